"""Whole values on every rank: each a part of a sum (`PartialTensor`), or the same on all (`ReplicatedTensor`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp
from torch.overrides import get_default_nowrap_functions

from shardwise import settings
from shardwise.autograd.transfers import Way, moved_locals
from shardwise.comm.agreement import in_op, in_step
from shardwise.comm.group import Fields, group_ranks, locate_all, or_default
from shardwise.comm.tracing import record
from shardwise.comm.transfer import make_plan
from shardwise.comm.transfer.views import resolved
from shardwise.errors import ProcessGroupError, PropertyError, RankMismatchError
from shardwise.layout import Axis, Cut, Layout, Places
from shardwise.layout.placement import Placement, rank_device
from shardwise.layout.specs import ChunkShardingSpec, FixedShardingSpec, ShardingSpec
from shardwise.tensor.dispatch import Distributed, refuse_collective, refuse_mixed, require_plain
from shardwise.tensor.frame import Frame, Parts
from shardwise.tensor.movement import places_on_all_ranks
from shardwise.tensor.shorthand import ShardingLike, parse_sharding
from shardwise.tensor.tensor import ShardedTensor
from shardwise.tensor.transforms import below_transforms
from shardwise.torch_private import DisableTorchFunctionSubclass, make_wrapper_subclass, pytree

REDUCTIONS: dict[Any, Callable[[torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: lambda stack: stack.sum(0, dtype=stack.dtype),
    ReduceOp.AVG: lambda stack: stack.sum(0, dtype=stack.dtype) / len(stack),
    ReduceOp.PRODUCT: lambda stack: stack.prod(0, dtype=stack.dtype),
    ReduceOp.MAX: lambda stack: stack.amax(0),
    ReduceOp.MIN: lambda stack: stack.amin(0),
}


class PartialTensor(Distributed, torch.Tensor):
    """A tensor that is the sum (or product, maximum, ...) of one tensor on each rank.

    It is reduced when its value is wanted, into the layout that is asked for: each rank receives only its own part of
    every other rank's tensor. An op on it first reduces it into chunks of its first dim. Every rank of the group makes
    it and takes part in what is asked of it::

        PartialTensor(x @ w).redistribute(ChunkShardingSpec(0, places))
    """

    _local: torch.Tensor
    _group: ProcessGroup
    _reduce_op: Any

    def __new__(
        cls, local_shard: torch.Tensor, process_group: ProcessGroup | None = None, reduce_op: Any = ReduceOp.SUM
    ) -> PartialTensor:
        """From this rank's contribution, which has the same size on every rank."""
        if not isinstance(local_shard, torch.Tensor):
            raise PropertyError(f"a partial tensor is made from a tensor, found {type(local_shard).__name__}")
        require_plain(local_shard, "this rank's part of a PartialTensor")
        if reduce_op not in REDUCTIONS:
            raise PropertyError(f"a partial tensor cannot be reduced by {reduce_op}")
        self: PartialTensor = make_wrapper_subclass(
            cls, local_shard.shape, dtype=local_shard.dtype, device=local_shard.device
        )
        self._local, self._group, self._reduce_op = local_shard, or_default(process_group), reduce_op
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Everything is done in `__new__`."""

    @property
    def _process_group(self) -> ProcessGroup:
        return self._group

    @below_transforms
    def redistribute(self, sharding_spec: ShardingLike, dims: Any = None) -> ShardedTensor:
        """The reduced tensor in this sharding, which is said as in `shard`. Every rank calls it. Differentiable."""
        return self._redistributed(sharding_spec, dims, in_step)

    def _redistributed(
        self, how: ShardingLike, dims: Any = None, agree: Callable[..., tuple[ShardingSpec, Layout]] = in_op
    ) -> ShardedTensor:
        """The same, by default as within an op: ranks that differ find out as they do in ops."""
        local, group = self._local, self._group

        def work() -> tuple[tuple[ShardingSpec, Layout], Fields]:
            spec = parse_sharding(how, dims, device_type=local.device.type, process_group=group)
            layout = locate_all(spec.layout(local.shape), group)
            fields = {"verb": "reduce", "reduce_op": self._reduce_op, "spec": layout.outline, "dtype": local.dtype}
            return (spec, layout), {**fields, "requires_grad": local.requires_grad}

        spec, layout = agree(group, work)
        source, target = _stacked(layout, places_on_all_ranks(group, local.device))
        record = torch.is_grad_enabled() and local.requires_grad
        part = local.reshape(1, *local.shape).contiguous()
        stacks, anchor = moved_locals([part], None, make_plan(source, target), Way(group), local.dtype, record=record)
        frame = Frame.of(layout, spec, layout.rows_on(dist.get_rank()), local.dtype, group)
        made = ShardedTensor._wrap(Parts(frame, [REDUCTIONS[self._reduce_op](stack) for stack in stacks]))
        if record and not stacks:
            made._wants_grad, made._anchor = True, anchor
        return made

    def reshard(self, resharding_spec: ShardingLike) -> ShardedTensor:
        """The old name of `redistribute`; nothing changes in place."""
        return self.redistribute(resharding_spec)

    @below_transforms
    def full_tensor(self) -> torch.Tensor:
        """The reduced tensor, whole on every rank. Every rank of the group calls it. Differentiable."""
        return self._reduced().full_tensor()

    def _reduced(self) -> ShardedTensor:
        """The reduced tensor, in chunks of its first dim; whole on the first rank if it has no dims."""
        kind = self._local.device.type
        places = [Placement(rank_device(rank, kind), rank).remote_device() for rank in group_ranks(self._group)]
        if not self._local.ndim:
            return self.redistribute(FixedShardingSpec.of(Layout.whole(self._local.shape, [Placement.of(places[0])])))
        return self.redistribute(ChunkShardingSpec(0, places))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override] # torch says Any
        how = str(self._reduce_op).rsplit(".", 1)[-1].lower()
        return f"PartialTensor({tuple(self.shape)}, {self.dtype}, a {how} over {self._group.size()} ranks)"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("__get__", "__repr__", "size", "dim", "numel", "__len__", "stride"):
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        refuse_mixed(func, args, kwargs, "PartialTensor")
        refuse_collective(func, args, kwargs)
        return func(*_resolved(args), **_resolved(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's is no method
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        refuse_collective(func, args, kwargs)
        return func(*_resolved(args), **_resolved(kwargs or {}))


def _resolved(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf._reduced() if isinstance(leaf, PartialTensor) else leaf, tree)


def _stacked(layout: Layout, places: Places) -> tuple[Layout, Layout]:
    """Every rank's tensor as a slice of a stack; and the stack in boxes of the layout, all slices of each."""
    count = len(places)
    each = Axis(count, 0, Cut.in_steps(count, count, 0, 1))
    return Layout.by_rule([count, *layout.size], [each], places), layout.with_dim(0, count)


class ReplicatedTensor(torch.Tensor):
    """A plain tensor that is promised to be the same on every rank of a group."""

    _process_group: ProcessGroup

    def __new__(cls, data: torch.Tensor | None = None, process_group: ProcessGroup | None = None) -> ReplicatedTensor:
        """The tensor with this promise; its memory is shared."""
        data = torch.empty(0) if data is None else data
        require_plain(data, "the value of a ReplicatedTensor")
        self = data.as_subclass(cls)
        self._process_group = or_default(process_group)
        return self

    def validate(self) -> bool:
        """Raise on every rank unless the tensor is the same on all of them. Every rank of the group calls it."""
        plain = resolved(self.detach().as_subclass(torch.Tensor)).contiguous()

        def work() -> tuple[None, Fields]:
            return None, {"verb": "validate", "size": tuple(plain.shape), "dtype": plain.dtype}

        in_step(self._process_group, work)
        ranks = group_ranks(self._process_group)
        everyone = [torch.empty_like(plain) for _ in ranks]
        with record.waiting("all-gather", *[plain.nbytes * (len(ranks) - 1)] * 2):
            dist.all_gather(everyone, plain, group=self._process_group)
        for rank, other in zip(ranks, everyone, strict=True):
            same = torch.equal(other.reshape(-1).view(torch.uint8), everyone[0].reshape(-1).view(torch.uint8))
            if not same:
                raise RankMismatchError(f"ReplicatedTensor have different values on rank {ranks[0]} and {rank}")
        return True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, Distributed) for kind in types):
            return NotImplemented  # theirs to compute
        refuse_mixed(func, args, kwargs, "ReplicatedTensor")
        groups = [one._process_group for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, ReplicatedTensor)]
        if any(group is not groups[0] for group in groups):
            name = getattr(func, "__name__", func)
            raise ProcessGroupError(f"ReplicatedTensor operands must be in the same process group, here of {name}")
        with DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func in get_default_nowrap_functions():
            return result
        # Where a plain tensor may be each rank's own, what is computed with one is each rank's own too; and by that
        # rule, which is the old one, so is what is computed with a number.
        old_rule = settings.current().own_batches
        alike = not old_rule or all(isinstance(one, ReplicatedTensor) for one in (*args, *(kwargs or {}).values()))
        return pytree.tree_map_only(torch.Tensor, lambda one: _marked(one, groups[0] if alike else None), result)


def _marked(tensor: torch.Tensor, process_group: ProcessGroup | None) -> torch.Tensor:
    """A result as a ReplicatedTensor of this group, or as a plain tensor."""
    if isinstance(tensor, ReplicatedTensor):  # a function in place gives what it was given
        return tensor
    if process_group is None:
        return tensor.as_subclass(torch.Tensor)
    made = tensor.as_subclass(ReplicatedTensor)
    made._process_group = process_group
    return made
