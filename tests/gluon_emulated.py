"""Gluon kernels run on a CPU by threads: what warps say to one another, and what they find in shared memory.

A kernel's text, and the device modules it imports, run as Python with stand-ins of Gluon's words. Each warpgroup and
the producer is a thread that is made to wait at random. Copies land at random times; products read shared memory as
late as their results are waited for. So a barrier that is missing shows as a wrong result, and one too many as a
thread that never ends. Memory that was not written is nan, or no place at all.
"""

import builtins
import functools
import importlib
import math
import random
import threading
import time
import types

import torch

from tiga.codegen import kernels, launch, launch_hopper, plan_hopper

PATIENCE = 20.0  # seconds that a thread waits at a barrier
MODULES = ("tiga.codegen.device_hopper", "tiga.codegen.device_hopper_pruned")
_here = threading.local()
failed = []  # what threads raised
ran = []  # grows by each kernel that runs here: launches that are kept from test to test know it


class Number(int):
    """A constant that also has `.value`."""

    value = property(int)


def constexpr(x):
    return Number(x) if isinstance(x, int) and not isinstance(x, bool) else x if isinstance(x, float) else Layout(x)


class Layout:
    """Any layout, or what is made of one: a CPU has none."""

    def __init__(self, *of):
        self.of = of

    value = property(lambda self: self)

    @staticmethod
    def get_default_for(*of):
        return Layout()


class Barrier:
    def __init__(self):
        self.condition, self.phase, self.waiting_for, self.bytes, self.count = threading.Condition(), 0, 0, 0, 0

    def init(self, count):
        self.count = self.waiting_for = int(count)

    def change(self, arrive, more):
        with self.condition:
            self.waiting_for -= arrive
            self.bytes += more
            assert self.waiting_for >= 0, "more arrive than are waited for"
            if self.waiting_for == 0 and self.bytes == 0:
                self.phase += 1
                self.waiting_for = self.count
                self.condition.notify_all()

    def wait(self, parity):
        stop()
        with self.condition:
            passed = lambda: failed or self.phase & 1 != int(parity)
            if not self.condition.wait_for(passed, PATIENCE) or failed:
                failed.append(TimeoutError(f"a barrier of {self.count}: phase {self.phase}, waited for {parity}"))
                raise failed[0]


def stop():
    if random.random() < 0.3:
        time.sleep(random.random() * 3e-4)


class Memory:
    """Shared memory, or a part of it."""

    def __init__(self, data):
        self.data = data

    shape = property(lambda self: self.data.shape)

    def index(self, k):
        assert 0 <= int(k) < len(self.data), f"part {int(k)} of {len(self.data)}"
        part = self.data[int(k)]
        return part if isinstance(part, Barrier) else Memory(part)

    def slice(self, start, length):
        return Memory(self.data[int(start) : int(start) + int(length)])

    def permute(self, order):
        return Memory(self.data.permute(order))

    def store(self, x):
        self.data.copy_(x)

    def load(self, layout):
        return self.data.clone()


class Pointer:
    """A place in a tensor's memory, or many."""

    def __init__(self, tensor, at=0):
        self.tensor, self.at = tensor.detach(), at

    def __add__(self, more):
        return Pointer(self.tensor, self.at + more)

    def __getitem__(self, key):
        return Pointer(self.tensor, self.at[key])

    def places(self, mask):
        base = self.tensor.storage_offset()
        at = torch.as_tensor(self.at) + base
        flat = torch.as_strided(
            self.tensor, (self.tensor.untyped_storage().nbytes() // self.tensor.element_size(),), (1,), 0
        )
        live = torch.ones_like(at, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
        at, live = torch.broadcast_tensors(at, live)
        return flat, at, live


def load(pointer, mask=None, other=0):
    flat, at, live = pointer.places(mask)
    return torch.where(live, flat[torch.where(live, at, 0)], torch.as_tensor(other, dtype=flat.dtype))


def store(pointer, x, mask=None):
    flat, at, live = pointer.places(mask)
    x = torch.as_tensor(x).to(flat.dtype).expand(at.shape)
    flat[at[live]] = x[live]


_counting = threading.Lock()


def atomic_add(pointer, x, sem=None):
    stop()
    with _counting:
        before = load(pointer)
        store(pointer, before + x)
    return before


class Flying:
    """A product that was begun."""

    def __init__(self, make):
        self.make, self.result = make, None

    def land(self):
        if self.result is None:
            self.result = self.make()
        return self.result


def product(a, b, acc, use_acc=True, is_async=False):
    read = lambda x: (x.data if isinstance(x, Memory) else x).float()
    start = acc if use_acc else 0.0
    assert not isinstance(start, Flying), "a sum that still flies"
    return Flying(lambda: start + read(a) @ read(b))


def product_wait(left, deps):
    stop()
    found = [x.land() for x in deps]
    return found[0] if len(found) == 1 else tuple(found)


def copy(descriptor, at, barrier, memory):
    """A box of a tensor, 0 outside of it, some time later."""
    base = descriptor.base.detach()
    box = torch.zeros(descriptor.block_shape, dtype=base.dtype)
    whole = torch.as_strided(base, descriptor.shape, descriptor.strides, base.storage_offset())
    inside, into = [], []
    for first, size, n in zip(at, descriptor.block_shape, descriptor.shape):
        first = int(first)
        low, high = max(first, 0), min(first + size, n)
        inside.append(slice(low, max(high, low)))
        into.append(slice(low - first, max(high, low) - first))
    box[tuple(into)] = whole[tuple(inside)]

    def later():
        time.sleep(random.random() * 1e-3)
        memory.data.copy_(box.reshape(memory.data.shape))
        barrier.change(0, -box.numel() * box.element_size())

    memory.data.fill_(math.nan)
    threading.Thread(target=later).start()


def allocate(dtype, shape, layout):
    shape = [int(n) for n in shape]
    if dtype == torch.int64:
        return Memory([Barrier() for _ in range(shape[0])])
    return Memory(torch.full(shape, math.nan if dtype.is_floating_point else -77_777, dtype=dtype))


def together(jobs):
    """Functions without arguments, each in a thread of its own; the first of their errors, once all have ended."""

    def run(job):
        try:
            job()
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failed:
        raise failed[0]


def specialize(parts, warps, registers):
    """The first part is of as many warps as the kernel."""
    place = _here.program

    def part(fn, args, count):
        _here.program, _here.warps = place, count
        fn(*args)

    together([functools.partial(part, fn, args, count) for (fn, args), count in zip(parts, (4, *warps))])


def where(c, a, b):
    c = torch.as_tensor(c)
    known = [x for x in (a, b) if isinstance(x, torch.Tensor)]
    dtype = torch.promote_types(known[0].dtype, known[1].dtype) if len(known) == 2 else None
    if dtype is None:
        wide = any(isinstance(x, float) for x in (a, b)) and not any(x.is_floating_point() for x in known)
        dtype = (
            torch.float32
            if wide
            else known[0].dtype
            if known
            else torch.float32
            if isinstance(a, float)
            else torch.int64
        )
    return torch.where(c, torch.as_tensor(a, dtype=dtype), torch.as_tensor(b, dtype=dtype))


def both(fn):
    return lambda a, b, *_, **__: fn(
        *[torch.as_tensor(x) if isinstance(x, (int, torch.Tensor)) else torch.tensor(x) for x in (a, b)]
    )


def reduce(x, axis, fn):
    parts = x.unbind(axis)
    found = parts[0]
    for part in parts[1:]:
        found = fn(found, part)
    return found


def assembly(text, constraints, args, dtype, is_pure, pack):
    if text.startswith("max.NaN"):
        return torch.maximum(*args)
    if text.startswith("min.NaN"):
        return torch.minimum(*args)
    if text.startswith("cvt.rn"):
        return args[0].to(torch.bfloat16 if "bf16" in text else torch.float16).float()
    if text.startswith("rcp"):
        return 1 / args[0]
    assert text.startswith("mov.b32"), text
    return args[0]


def words():
    """Gluon's language."""
    f = lambda fn: lambda x, *a, **k: fn(torch.as_tensor(x), *a)
    names = {n: f(getattr(torch, n)) for n in "abs ceil cos erf exp exp2 floor log log2 rsqrt sin sqrt".split()}
    names |= {n: getattr(torch, n) for n in "bfloat16 float16 float32 int8 int16 int32 int64 uint8".split()}
    names |= {n: Layout for n in "NVMMADistributedLayout SliceLayout BlockedLayout DotOperandLayout".split()}
    names |= {n: Layout for n in "NVMMASharedLayout SwizzledSharedLayout DistributedLinearLayout".split()}
    names |= {
        "int1": torch.bool,
        "constexpr": constexpr,
        "arange": lambda a, b, layout=None: torch.arange(int(a), int(b)),
        "cast": lambda x, dtype: torch.as_tensor(x).to(dtype),
        "cdiv": lambda a, b: -(-a // b),
        "convert_layout": lambda x, *a, **k: x,
        "full": lambda shape, x, dtype, layout=None: torch.full([int(n) for n in shape], x, dtype=dtype),
        "zeros": lambda shape, dtype, layout=None: torch.zeros([int(n) for n in shape], dtype=dtype),
        "atomic_add": atomic_add,
        "load": load,
        "store": store,
        "max": lambda x, axis: (
            torch.where(x.isnan(), -math.inf, x).amax(axis) if x.is_floating_point() else x.amax(axis)
        ),
        "min": lambda x, axis: (
            torch.where(x.isnan(), math.inf, x).amin(axis) if x.is_floating_point() else x.amin(axis)
        ),
        "sum": lambda x, axis: x.sum(axis),
        "maximum": both(lambda a, b: torch.fmax(a, b)),
        "minimum": both(lambda a, b: torch.fmin(a, b)),
        "where": where,
        "reduce": reduce,
        "inline_asm_elementwise": assembly,
        "static_range": range,
        "num_warps": lambda: _here.warps,
        "program_id": lambda axis: torch.tensor(_here.program[0]),
        "num_programs": lambda axis: torch.tensor(_here.program[1]),
        "allocate_shared_memory": allocate,
        "warp_specialize": specialize,
        "PropagateNan": types.SimpleNamespace(ALL=None),
    }
    return names


def module(name, **names):
    found = types.ModuleType(name)
    found.__dict__.update(names)
    return found


def jit(fn=None, **options):
    return (lambda g: g) if fn is None else fn


def stand_ins():
    language = module("gluon.language", **words())
    barriers = module(
        "mbarrier",
        MBarrierLayout=Layout,
        init=lambda b, count: b.init(count),
        expect=lambda b, size: b.change(1, int(size)),
        arrive=lambda b, count=1, pred=True: b.change(count, 0) if pred else None,
        wait=lambda b, phase, pred=True: b.wait(phase) if pred else None,
    )
    hopper = module(
        "hopper",
        mbarrier=barriers,
        tma=module("tma", async_copy_global_to_shared=copy),
        warpgroup_mma=product,
        warpgroup_mma_wait=product_wait,
        fence_async_shared=lambda: None,
    )
    return {
        "triton.experimental": module("experimental", gluon=module("gluon", language=language, jit=jit)),
        "triton.experimental.gluon": module("gluon", language=language, jit=jit),
        "triton.experimental.gluon.language": language,
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
        "triton.language": language,
    }


def loaded():
    """The namespace that texts run in: imports find stand-ins, and device modules made with them."""
    known, real = stand_ins(), builtins.__import__

    def instead(name, globals=None, locals=None, fromlist=(), level=0):
        if name in known:
            return known[name]
        if name == "tiga.codegen" and fromlist:
            return module(name, **{n: known[f"{name}.{n}"] for n in fromlist})
        return real(name, globals, locals, fromlist, level)

    space = {**vars(builtins), "__import__": instead}
    for name in MODULES:
        path = importlib.util.find_spec(name).origin
        with open(path) as f:
            text = f.read()
        known[name] = module(name)
        known[name].__dict__["__builtins__"] = space
        exec(compile(text, path, "exec"), known[name].__dict__)
    return space


def run(text, values, programs):
    """The kernel of a text, all its programs at a time."""
    scope = {"__name__": "emulated", "__builtins__": loaded()}
    exec(compile(text, "<emulated>", "exec"), scope)
    as_value = lambda x: (
        Pointer(x) if isinstance(x, torch.Tensor) else x if hasattr(x, "block_shape") else torch.tensor(x)
    )
    values = [as_value(x) for x in values]
    failed.clear()

    def program(k):
        _here.program, _here.warps = (k, programs), 4
        scope["propagate"](*values)

    together([functools.partial(program, k) for k in range(programs)])


def stand_in(monkeypatch, fewest):
    """A chip of sm_90 with two multiprocessors, which runs Gluon kernels here. Gives `ran`, empty."""
    interpreted = launch.runner

    def runner(text, values, plan, grid, device):
        if "gluon" not in text:
            return interpreted(text, values, plan, grid, device)
        return kernels.Runner(lambda *arguments: ran.append(run(text, arguments, grid[0])), 0, None)

    monkeypatch.setattr(launch, "runner", runner)
    monkeypatch.setattr(launch_hopper, "unavailable", lambda device: "")
    monkeypatch.setattr(launch_hopper, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(plan_hopper, "FEWEST", fewest)
    ran.clear()
    return ran
