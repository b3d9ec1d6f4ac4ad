"""What a compiler's graph says of a node: whether its tensor lies in memory anyway, what follows, what may move."""

from __future__ import annotations

import operator
from typing import Any

import torch

from tiga.inductor.draft import Draft, Written, constant, kept_meta, same_sizes, shown, viewed
from tiga.inductor.meanings import LAYOUT, MEANINGS, VIEWS, Unfit

Node = Any
propagate = torch.ops.tiga.propagate.default
_COMPUTED = (torch.Tag.pointwise, torch.Tag.nondeterministic_seeded)


def is_call(node: Node) -> bool:
    """Whether a node calls the operator in the way it is traced, on tensors whose shapes are known."""
    if node.target is not propagate or len(node.args) != 4:
        return False
    return all("val" in n.meta for n in (node, *node.all_input_nodes))


def calls_of(graph: torch.fx.Graph) -> list[Node]:
    """The graph's calls, in order."""
    return [n for n in graph.find_nodes(op="call_function", target=propagate) if is_call(n)]


def has_meaning(node: Node) -> bool:
    """Whether a program could compute the node. Of several results that are taken apart, those that it computes."""
    if node.op != "call_function" or node.target not in MEANINGS:
        return False
    return node.target is not operator.getitem or has_meaning(node.args[0])


def is_layout(node: Node) -> bool:
    """Whether a node computes nothing."""
    return has_meaning(node) and (node.target in LAYOUT or node.target in VIEWS)


def is_pointwise(node: Node) -> bool:
    """Whether the compiler computes the node where it is read, and so need not write it; random numbers it does."""
    tags = getattr(node.target, "tags", ())
    return has_meaning(node) or (node.op == "call_function" and any(tag in tags for tag in _COMPUTED))


def is_written(node: Node) -> bool:
    """Whether what reads the node needs its tensor in memory."""
    return any(
        not is_pointwise(u) or (is_layout(u) and u.target is not operator.getitem and is_written(u)) for u in node.users
    )


def is_stored(node: Node) -> bool:
    """Whether the tensor lies in memory, whoever else reads it."""
    if not is_pointwise(node) or constant(node) is not None:
        return True
    if is_layout(node) and node.target is not operator.getitem:
        return is_stored(node.args[0]) or is_written(node)
    return is_written(node)


def is_small(node: Node, beside: Any) -> bool:
    """Whether a tensor is a fraction of another: what a fold over features leaves."""
    val = shown(node)
    if not isinstance(val, torch.Tensor):
        return False
    mine, others = [1, *val.shape[1:]], [1, *beside.shape[1:]]
    if not all(isinstance(s, int) for s in (*mine, *others)):
        return False
    return 4 * torch.Size(mine).numel() <= torch.Size(others).numel()


def direction(node: Node) -> Any:
    """Forward or backward, in a graph that holds both, and the region that is computed again in backward."""
    return node.meta.get("tiga_direction", node.meta.get("partitioner_tag", "")), node.meta.get("ac_graph_id")


def settle(graph: Any) -> None:
    """What forward is made of is forward: torch 2.14 calls some of it backward, as backward reads it as well."""
    for node in reversed(graph.nodes):
        if direction(node)[0] == "is_backward" and any(direction(u)[0] == "is_forward" for u in node.users):
            node.meta["tiga_direction"] = "is_forward"


def following(node: Node) -> set[Node]:
    """All nodes that follow from one."""
    found: set[Node] = set()
    todo = [node]
    while todo:
        for user in todo.pop().users:
            if user not in found:
                found.add(user)
                todo.append(user)
    return found


def stays(node: Node) -> bool:
    """Whether a node's place among the others matters: random operations, changes of memory, and what is not known."""
    if isinstance(node.target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in node.target.tags or node.target._schema.is_mutable
    return node.op != "call_function" or not (
        node.target is operator.getitem or getattr(node.target, "__module__", "") in ("_operator", "math")
    )


def hoist(nodes: list[Node], call: Node, after: set[Node], really: bool) -> None:
    """Move before `call` what these nodes need; refused where they follow from it, or stay where they are."""
    found: set[Node] = set()
    todo = [n for n in nodes if call < n]
    while todo:
        node = todo.pop()
        if node in found:
            continue
        if node in after or stays(node):
            raise Unfit(f"{node.target} is known only after it, or keeps its turn")
        found.add(node)
        todo.extend([n for n in node.all_input_nodes if call < n])
    for node in sorted(found) if really else ():
        call.prepend(node)


def results(call: Node) -> list[list[Node]]:
    """For each of a call's results, the nodes that take it."""
    return [[u for u in call.users if u.args[1] == k] for k in range(len(call.meta["val"]))]


def put(draft: Draft, written: Written, outputs: list[list[Node]]) -> Node:
    """The written program in the place of the draft's call; its results in the place of these nodes."""
    call, graph = draft.call, draft.call.graph
    with graph.inserting_before(call):
        tensors = [s.insert(graph, draft.known) for s in written.sources] + draft.relation
        args = (written.text, tensors, draft.ints, written.scalars)
        new = graph.call_function(call.target, args)
    with torch.no_grad():
        given = [shown(t) for t in tensors]
        made = call.target(written.text, given, [shown(n) for n in draft.ints], written.scalars)
    new.meta = {**kept_meta(call), "val": made}
    last = new
    for k, (nodes, val) in enumerate(zip(outputs, made)):
        for node in nodes:
            with graph.inserting_after(last):
                last = graph.call_function(operator.getitem, (new, k))
            last.meta = {**kept_meta(call), "val": val}  # saved or computed again with the call, not without it
            if not same_sizes(val.shape, shown(node).shape):
                follows = last.next
                with graph.inserting_before(follows):
                    last = viewed(graph, last, shown(node), [*draft.known, *[s.node for s in written.sources]])
            node.replace_all_uses_with(last)
    return new


def sweep(nodes: Any) -> None:
    """Erase those that nothing reads."""
    for node in sorted(nodes, reverse=True):
        if not node.users:
            node.graph.erase_node(node)


def names(nodes: Any) -> str:
    """The operations of these nodes, each once, in order."""
    return ", ".join(dict.fromkeys([str(n.target).removesuffix(".default") for n in sorted(nodes)]))
