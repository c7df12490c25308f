"""Transfers of a graph that begin early and end late, so that kernels run while data is on its way.

A transfer begins before the first use of the last transfer's results, if its operands do not depend on them: so the
next parameters of a fully sharded model are gathered while a layer computes. It ends before the first use of its own
results, and before the graph writes into an input: so gradients are summed while the backward goes on. At most `MOST`
are under way at once, which bounds their memory. On an accelerator, matrix products that a transfer does not wait for,
such as gradients of weights, move behind its begin: so they are computed while gradients of activations are on their
way. (The cores of a CPU send what they compute: there it is not worth a second half.)

The order in which transfers begin is that of the graph, as it is on all ranks. A transfer whose results are used at
once stays one op.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from shardwise.compilation.full_graph import graph_ops  # noqa: F401 # defines the ops
from shardwise.torch_private import load_private, unset_fake_mode

MOST = 2  # transfers that are under way at once
MOST_HOISTED = 16  # ops that are hoisted with a transfer, such as casts of its operands
ops = torch.ops.shardwise
VIEWS = {operator.getitem, torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default}  # beside what says so
PRODUCTS = {getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm")}
HALVES: dict[Any, Any] = {  # the first half of each transfer
    ops.transfer.default: ops.begin.default,
    ops.transfer_of_size.default: ops.begin_of_size.default,
}


def with_early_transfers(compile: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler of graphs, as inductor's ``compile``, whose transfers begin early."""

    def compile_early(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        if not _transfers(module.graph):
            return compile(module, inputs, **options)
        begin_early(module, delays=any(map(_is_on_accelerator, module.graph.nodes)))
        # The order of this graph is final. For locality, inductor would move `finish` behind readers of the results,
        # which nothing but its place forbids; for memory, directly behind `begin`, or all transfers to the end.
        orders = {"reorder_for_locality": False, "reorder_for_peak_memory": False}
        with load_private("torch._inductor.config").patch(orders):
            return compile(module, inputs, **options)

    return compile_early


def begin_early(module: fx.GraphModule, *, delays: bool = False) -> int:
    """Change a graph of aten ops in place; gives how many transfers are in two halves now.

    With ``delays``, matrix products move behind transfers that do not wait for them.
    """
    graph = module.graph
    transfers = _transfers(graph)
    for node in transfers:
        _unpack_directly(graph, node)
        _take_views_late(node)
    for last, node in pairwise(transfers):
        _hoist(graph, last, node)
    if delays:
        _delay_products(graph, transfers)
    split = _split(graph, transfers)
    if transfers:
        _chain(graph, transfers[0].args[0])
        graph.lint()
        module.recompile()
    return split


def _transfers(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.target in HALVES]


def _is_on_accelerator(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta")


# Beginning earlier ----------------------------------------------------------------------------------------------------


def _hoist(graph: fx.Graph, last: fx.Node, node: fx.Node) -> None:
    """Move a transfer directly before the first use of the last one's results, unless an operand depends on them."""
    use, brought = _first_use(graph, last), set(_results(last)[1:])
    if use > node:
        return
    moved, new = {node}, [node]
    while new and len(moved) <= MOST_HOISTED:
        inputs = new.pop().all_input_nodes
        if brought.intersection(inputs):
            return
        new += (later := {one for one in inputs if one >= use} - moved)
        moved |= later
    if new or not all(one is node or _may_move(one) for one in moved):
        return
    for one in sorted(moved):
        use.prepend(one)
    _unpack_directly(graph, node)


def _take_views_late(node: fx.Node) -> None:
    """Move views of a transfer's results directly before their first use, which is then that of the transfer."""
    views: list[fx.Node] = []
    new = _results(node)[1:]
    while new:
        found = [one for one in new.pop().users if _is_view(one) and one.users and one not in views]
        new += found
        views += found
    for one in sorted(views, reverse=True):
        min(one.users).prepend(one)


def _may_move(node: fx.Node) -> bool:
    """Whether a node is pure; functions outside of aten may be collectives, whose order is that of all ranks."""
    if node.target is operator.getitem:
        return True
    is_aten = node.op == "call_function" and getattr(node.target, "namespace", "") in ("aten", "prims")
    return is_aten and not (node.is_impure() or _is_random(node.target))


def _is_random(target: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


# Computing later ------------------------------------------------------------------------------------------------------


def _delay_products(graph: fx.Graph, transfers: Sequence[fx.Node]) -> None:
    """Move products behind transfers that do not wait for them, and share them out among transfers."""

    def until(number: int) -> fx.Node:
        """The node before which a transfer ends, at the latest where as many others as may be under way have begun."""
        return min([_latest_end(graph, transfers[number]), *transfers[number + MOST : number + MOST + 1]])

    delayed = [
        _delay(until(number - 1) if number else None, node, until(number)) for number, node in enumerate(transfers)
    ]
    for number, products in enumerate(delayed[:-1], 1):
        _share(products, transfers[number], until(number))


def _delay(after: fx.Node | None, node: fx.Node, until: fx.Node) -> list[fx.Node]:
    """Move products that a transfer does not wait for behind it; gives these products.

    Those that are computed while the last transfer is under way, before ``after``, stay where they are.
    """
    needed = _needed(after, node)
    return [one for one in _products(after, node) if _move_before(one, until, needed)]


def _share(products: Sequence[fx.Node], node: fx.Node, until: fx.Node) -> None:
    """Move half of the products before a transfer behind it, if nothing is computed there."""
    if products and not _products(node, until):
        needed = _needed(products[0], node)
        for one in products[(len(products) + 1) // 2 :]:
            if one < node:
                _move_before(one, until, needed)


def _products(after: fx.Node | None, before: fx.Node) -> list[fx.Node]:
    """The matrix products between two nodes; none if the second one does not come behind the first."""
    found: list[fx.Node] = []
    if after is not None and after >= before:
        return found
    while (before := before.prev) is not after and before.op != "root":
        if before.target in PRODUCTS:
            found.append(before)
    return found[::-1]


def _needed(after: fx.Node | None, node: fx.Node) -> set[fx.Node]:
    """What a node waits for, from another node on."""
    found, new = set[fx.Node](), [node]
    while new:
        inputs = {one for one in new.pop().all_input_nodes if after is None or one >= after} - found
        found |= inputs
        new += inputs
    return found


def _move_before(product: fx.Node, until: fx.Node, needed: set[fx.Node]) -> bool:
    """Move a product, and what is made of it, directly before a node, unless that is needed sooner or may not move."""
    moved, new = {product}, [product]
    while new:
        users = {one for one in new.pop().users if one < until} - moved
        moved |= users
        new += users
    if moved & needed or not all(map(_may_move, moved)):
        return False
    for one in sorted(moved):
        until.prepend(one)
    return True


# Two halves -----------------------------------------------------------------------------------------------------------


def _split(graph: fx.Graph, transfers: Sequence[fx.Node]) -> int:
    """Split transfers in two halves where anything is computed between both, and place the second ones."""
    count = 0
    under_way: list[fx.Node] = []
    ends: dict[fx.Node, list[fx.Node]] = {}  # the first halves that end before a node
    latest = {node: _latest_end(graph, node) for node in transfers}
    wanted = {node for node in transfers if _computes_between(node, latest[node])}
    for node in list(graph.nodes):
        for begun in [one for one in under_way if latest[one] is node]:
            under_way.remove(begun)
            ends.setdefault(node, []).append(begun)
        if node in wanted:
            if len(under_way) == MOST:
                ends.setdefault(node, []).append(under_way.pop(0))
            under_way.append(node)
            count += 1
    for node, begun in ((node, one) for node, several in ends.items() for one in several):
        _end_before(graph, begun, node)
    return count


def _latest_end(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The node before which a transfer must have ended: the first use of its results, or a write into an input.

    The input may be an operand, or share its memory.
    """
    use = _first_use(graph, node)
    while (node := node.next) is not use:
        if _writes(node):
            return node
    return use


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def _computes_between(node: fx.Node, end: fx.Node) -> bool:
    """Whether a kernel runs, or another transfer begins, after a node and before another one."""
    while (node := node.next) is not end:
        if node.op == "call_function" and not _is_view(node):
            return True
    return False


def _is_view(node: fx.Node) -> bool:
    return node.target in VIEWS or bool(getattr(node.target, "is_view", False))


def _end_before(graph: fx.Graph, node: fx.Node, end: fx.Node) -> None:
    """Replace a transfer by its first half, and put the second half before another node."""
    arguments: Any = node.args
    token, tensors, *rest = arguments
    with graph.inserting_before(node):
        tensors = [_in_own_memory(graph, one) for one in tensors]
    node.target, node.args = HALVES[node.target], (token, tensors, *rest)
    node.meta.pop("eager_input_vals", None)  # operands may have any strides
    begun, *outs = _results(node)
    with graph.inserting_before(end):
        made = graph.call_function(ops.finish.default, (begun, begun, outs, tensors))
    with unset_fake_mode():  # sizes may be of a mode of their own
        made.meta["val"] = begun.meta["val"].new_empty(())


def _in_own_memory(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A node with the same memory in both halves: a compiler may make a copy of a view for each of its users."""
    value = node.meta["val"]
    if node.op == "placeholder" or (value.is_contiguous() and not _is_view(node)):
        return node
    made = graph.call_function(ops.own_memory.default, (node,))
    with unset_fake_mode():
        made.meta["val"] = torch.empty_like(value, memory_format=torch.contiguous_format)
    return made


# The chain -----------------------------------------------------------------------------------------------------------


def _chain(graph: fx.Graph, token: Any) -> None:
    """Let all halves and whole transfers take and give the token in the order of the graph."""
    last = None
    for node in list(graph.nodes):
        if node.target in HALVES or node.target in HALVES.values():
            node.args = (token, *node.args[1:])
            token = last = _results(node)[0]
        elif node.target is ops.finish.default:
            node.args = (token, *node.args[1:])
            token = node
        elif last is not None and token is not last:  # the results of the graph depend on the last second half
            node.replace_input_with(last, token)


def _unpack_directly(graph: fx.Graph, node: fx.Node) -> None:
    """Move the `getitem` nodes of a transfer directly behind it; there is one of the token."""
    if not any(one.args[1] == 0 for one in _results(node)):
        with graph.inserting_after(node):
            token = graph.call_function(operator.getitem, (node, 0))
        token.meta["val"] = node.meta["val"][0]
    for one in reversed(_results(node)):
        node.append(one)


def _results(node: fx.Node) -> list[fx.Node]:
    """The token that a transfer gives, then what it brings and is used."""

    def number(one: fx.Node) -> Any:
        return one.args[1]

    return sorted((one for one in node.users if one.target is operator.getitem), key=number)


def _first_use(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The first node that takes anything that a transfer brings; the end of the graph if there is none."""
    return min((user for one in _results(node)[1:] for user in one.users), default=graph.output_node())
