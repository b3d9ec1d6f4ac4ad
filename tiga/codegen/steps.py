"""The launches of a work, found once for calls of one form: warp-specialised ones where they pay, else plain ones."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

from tiga import passes
from tiga.codegen import tuning
from tiga.codegen.calls import Call, Prepared, execute
from tiga.codegen.kernels import keep
from tiga.codegen.launch import Launch
from tiga.codegen.launch_hopper import hopper_steps

MOST_RECORDS = 4096


def launch(ready: Prepared, call: Call, spans: Callable[[Prepared, Call, int], dict[str, Any]]) -> tuple[str, ...]:
    """Run one work, filling its results; the texts that ran.

    `spans` gives what a kernel is told of the relation, for tiles of BLOCK_M.
    """
    known = _records.setdefault(ready, {})
    steps = known.get(call.key)
    if steps is None or (not steps.timed and tuning.tuning(call.device)):
        if len(known) >= MOST_RECORDS:
            known.clear()
        tape, call.tape = call.tape, None  # launches to time plans by are no part of the call
        with contextlib.nullcontext() if tape is None else tape.paused():
            found = hopper_steps(ready, call, spans)
            steps = known[call.key] = found if found is not None else Launch(ready, call, spans).steps()
        call.tape = tape
        for record in steps.records:
            keep(record.text, record.runner.compiled)
    execute(steps, ready, call, spans)
    for name in steps.noted:
        passes.ran(name)
        if call.tape is not None:
            call.tape.passes.add(name)
    return steps.texts


_records: weakref.WeakKeyDictionary[Prepared, dict] = weakref.WeakKeyDictionary()
