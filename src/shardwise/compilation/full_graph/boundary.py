"""Where the traced computation begins and ends, as autograd sees it.

All gradients of leaves that have replicas, or are plain, are summed over ranks in the node that lies before everything
else. Autograd runs that node last, and so it also ends the chain of transfers of the backward: the token of the last
transfer is its gradient of the anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.comm.transfer.all_reduce import holding_of
from shardwise.compilation.full_graph.graph_ops import GraphTransfers
from shardwise.compilation.full_graph.graph_transfer import LeafSums, ReplicaSums
from shardwise.compilation.full_graph.input_forms import InputForm
from shardwise.layout import Layout
from shardwise.ops.engine.plain_operand import everywhere, set_stand_in


class _SharedLeaf(NamedTuple):
    """A leaf whose gradient is a sum over ranks."""

    layout: Layout
    group: ProcessGroup
    dtype: torch.dtype
    tensors: int  # how many there are in the graph: local tensors, or an anchor


class _Begin(torch.autograd.Function):
    """The same tensors; in the backward, the gradients of leaves are summed over ranks, after everything else."""

    @staticmethod
    def forward(
        ctx: Any, transfers: GraphTransfers, leaves: Sequence[_SharedLeaf], anchor: torch.Tensor, *tensors: torch.Tensor
    ) -> Any:
        """The anchor, and the tensors of all leaves."""
        ctx.set_materialize_grads(False)
        ctx.transfers, ctx.leaves = transfers, leaves
        ctx.save_for_backward(*tensors)
        return anchor.view_as(anchor), *[tensor.view_as(tensor) for tensor in tensors]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """The token of the last transfer, and the sums."""
        rest, tensors = list(grads[1:]), iter(ctx.saved_tensors)
        used: dict[Any, list[tuple[_SharedLeaf, list[torch.Tensor]]]] = {}
        order: list[list[torch.Tensor | None]] = []
        rank = dist.get_rank()
        for leaf in ctx.leaves:
            own = [next(tensors) for _ in range(leaf.tensors)]
            found, rest = rest[: leaf.tensors], rest[leaf.tensors :]
            order.append([None] * leaf.tensors)
            if all(one is None for one in found):
                continue
            filled = [torch.zeros_like(one) if grad is None else grad for grad, one in zip(found, own, strict=True)]
            order[-1] = list(filled)
            kind = id(leaf.group), leaf.dtype, leaf.layout.places.device_types
            used.setdefault(kind, []).append((leaf, order[-1]))  # type: ignore[arg-type] # none is None
        for same in used.values():
            _add_up(ctx.transfers, same, rank)
        summed = [grad for each in order for grad in each]
        return None, None, ctx.transfers.token, *summed


def _add_up(transfers: GraphTransfers, leaves: Sequence[tuple[_SharedLeaf, list[torch.Tensor]]], rank: int) -> None:
    """Put sums in the place of the gradients of these leaves, which are of one group and dtype."""
    group, dtype = leaves[0][0].group, leaves[0][0].dtype
    together = []
    for leaf, grads in leaves:
        if holding_of(leaf.layout, rank, group.size()).twice:
            grads[:] = transfers.add(ReplicaSums(leaf.layout, group, dtype), _local(leaf, grads, rank)) or grads
        else:
            together.append((leaf, grads))
    if not together:
        return
    sums = LeafSums(tuple(leaf.layout for leaf, _ in together), group, dtype)
    found = iter(transfers.add(sums, [one for leaf, grads in together for one in _local(leaf, grads, rank)]))
    for leaf, grads in together:
        if _has_shards(leaf, rank):
            grads[:] = [next(found) for _ in grads]


def _has_shards(leaf: _SharedLeaf, rank: int) -> bool:
    return len(leaf.layout.rows_on(rank)) > 0


def _local(leaf: _SharedLeaf, grads: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
    return grads if _has_shards(leaf, rank) else []


class _End(torch.autograd.Function):
    """The same tensors, so that the backward of each reaches the anchor; with their gradients the backward begins."""

    @staticmethod
    def forward(ctx: Any, transfers: GraphTransfers, anchor: torch.Tensor, *tensors: torch.Tensor) -> Any:
        """The tensors."""
        ctx.transfers = transfers
        ctx.save_for_backward(anchor)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The same gradients."""
        anchor: torch.Tensor = ctx.saved_tensors[0]
        ctx.transfers.begin_backward(next((grad for grad in grads if grad.device == anchor.device), grads[0]))
        return None, torch.zeros_like(anchor), *grads


_begin: Callable[..., tuple[torch.Tensor, ...]] = _Begin.apply  # which torch declares without types
_end: Callable[..., tuple[torch.Tensor, ...]] = _End.apply


def enter_graph(
    transfers: GraphTransfers,
    anchor: torch.Tensor,
    inputs: Sequence[InputForm],
    tensors: Sequence[Sequence[torch.Tensor]],
) -> list[torch.Tensor]:
    """The tensors of a call, made of the inputs of a graph: for each form the graph's tensors in its place."""
    groups = [one.group for one in inputs if one.group is not None]
    recorded = torch.is_grad_enabled()
    pairs = zip(inputs, tensors, strict=True)
    shared = [_shared_leaf(one, each, groups) if recorded else None for one, each in pairs]
    leaves = [leaf for leaf in shared if leaf is not None]
    given = [tensor for leaf, each in zip(shared, tensors, strict=True) if leaf is not None for tensor in each]
    transfers.anchor, *aliases = _begin(transfers, leaves, anchor, *given)
    rest, made = iter(aliases), []
    for one, leaf, each in zip(inputs, shared, tensors, strict=True):
        own = list(each)
        is_sharded = one.frame is not None
        if leaf is not None and is_sharded:
            own = [next(rest) for _ in own]
        elif one.grad and (leaf is not None or not one.is_leaf):
            own = [tensor.view_as(tensor) if tensor.is_leaf else tensor for tensor in own]
        if leaf is not None and not is_sharded:
            set_stand_in(own[0], leaf.group, next(rest))
        made.append(one.tensor_of(own))
    return made


def _shared_leaf(one: InputForm, tensors: Sequence[torch.Tensor], groups: Sequence[ProcessGroup]) -> _SharedLeaf | None:
    """The leaf that an input is, if its gradient is a sum over ranks."""
    if not one.grad or not one.is_leaf or not groups:
        return None
    if one.frame is not None:
        group, layout = one.group, one.frame.layout
        if group is None or group.size() == 1 or not layout.has_replicas:
            return None
        return _SharedLeaf(layout, group, one.dtype, one.count)
    if groups[0].size() == 1:
        return None
    return _SharedLeaf(everywhere(tensors[0], groups[0]), groups[0], one.dtype, 1)


def leave_graph(transfers: GraphTransfers, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a graph: these tensors, whose backward runs all that the graph's backward has to do."""
    outs = list(tensors)
    numbers = [k for k, tensor in enumerate(outs) if tensor.requires_grad]
    if numbers and transfers.anchor is not None and torch.is_grad_enabled():
        for k, tensor in zip(numbers, _end(transfers, transfers.anchor, *[outs[k] for k in numbers]), strict=True):
            outs[k] = tensor
    return outs
