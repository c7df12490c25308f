"""Transfers under autograd: the backward of a transfer is the transfer backwards, on every rank, whatever it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise import settings
from shardwise.layout import Layout
from shardwise.sharded_tensor.gradient_buckets import agreed_sum, compared, put_off
from shardwise.sharded_tensor.recorded_backward import all_depending, depending, passed
from shardwise.transfer import Tell, TransferPlan, empty_tensors, make_plan, move
from shardwise.transfer.all_reduce import ReplicaSums

if TYPE_CHECKING:
    from shardwise.sharded_tensor.wrapper import Wrapper


IN_BACKWARD = "a transfer in the backward"


def _at_once() -> None:
    """Nothing to wait for."""


class Way(NamedTuple):
    """How a transfer goes: in which group, under which limit, and after what."""

    group: ProcessGroup
    max_bytes: int | None = None
    ready: Callable[[], object] = _at_once
    fill: Any = None  # what elements hold that nothing is moved to
    tell: Tell | None = None  # by which a few bytes go instead
    verb: str = "a transfer"  # as errors call it

    def backward(self, plan: TransferPlan, dtype: torch.dtype) -> Way:
        """How a transfer of the backward goes. If checks are strict, ranks begin to compare at once which one it is."""
        if not plan.moved:
            return self
        if not settings.current().strict:  # the transfer says all of this
            return self._replace(verb=IN_BACKWARD)
        fields = {"verb": IN_BACKWARD, "from": plan.src.outline, "to": plan.dst.outline}
        return self._replace(ready=compared(self.group, {**fields, "dtype": dtype}), verb=IN_BACKWARD)

    def kept(self) -> Way:
        """What a graph keeps of it: gradients are 0 where nothing is moved to."""
        if self.ready is _at_once and self.fill is None and self.tell is None:
            return self
        return self._replace(ready=_at_once, fill=None if self.fill is None else 0, tell=None)

    def options(self) -> dict[str, Any]:
        """As `move` takes them."""
        return {
            "process_group": self.group,
            "max_bytes": self.max_bytes,
            "ready": self.ready,
            "fill": self.fill,
            "tell": self.tell,
            "verb": self.verb,
        }


class Differentiable(torch.autograd.Function):
    """A transfer that autograd can take back: its backward is the reverse transfer.

    The backward is a collective, so it must run on every rank. A rank without local tensors takes part through an
    anchor: a scalar zero, in place of the tensors it does not have, that hangs in the graph as they would.
    """

    @staticmethod
    def forward(ctx: Any, plan: TransferPlan, way: Way, dtype: torch.dtype, *tensors: torch.Tensor) -> Any:
        """The destination's local tensors, then an anchor; the inputs are the source's, then an anchor."""
        ctx.plan, ctx.dtype, ctx.way = plan, dtype, way.kept()
        outs = move(plan, tensors[:-1], dtype=dtype, **way.options()).wait()
        anchor = torch.zeros((), device=tensors[-1].device)
        ctx.save_for_backward(anchor)
        return *outs, anchor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The gradients on their way back; what went to several replicas is added up."""
        contiguous = all_depending(grads, ctx)
        plan = ctx.plan.reverse()
        return None, None, None, *_again(plan, ctx.way.backward(plan, ctx.dtype), ctx.dtype, *contiguous)


_apply: Callable[..., tuple[torch.Tensor, ...]] = Differentiable.apply  # which torch declares without types


def _again(plan: TransferPlan, way: Way, dtype: torch.dtype, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A transfer in a backward, which may be recorded."""
    outs = _apply(plan, way, dtype, *tensors)
    if torch.is_grad_enabled():
        passed(outs[-1])
    return outs


class Whole(torch.autograd.Function):
    """The whole tensor on every rank: a plain one, the same everywhere, and so is its gradient.

    So the backward moves nothing: every rank has the whole gradient, and takes the part of its own shards.
    """

    @staticmethod
    def forward(ctx: Any, plan: TransferPlan, way: Way, dtype: torch.dtype, *tensors: torch.Tensor) -> Any:
        """The plan goes to all of the tensor on each rank; the last tensor is an anchor."""
        ctx.plan, ctx.dtype, ctx.way = plan, dtype, way.kept()
        anchor = torch.zeros((), device=tensors[-1].device)
        ctx.save_for_backward(anchor)
        return move(plan, tensors[:-1], dtype=dtype, **way.options()).wait()[0], anchor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The gradient of each shard; of replicas, which are added up, that of the first."""
        records = torch.is_grad_enabled()
        grad = depending(grads[0], ctx.saved_tensors[0]) if records else grads[0]
        parts = _own(ctx.plan, ctx.way, ctx.dtype, grad)
        if records:
            passed(parts[-1])
        return None, None, None, *parts


def whole_of(plan: TransferPlan, way: Way, dtype: torch.dtype, *tensors: torch.Tensor) -> torch.Tensor:
    """All of a tensor; the last of these tensors is an anchor."""
    return _whole(plan, way, dtype, *tensors)[0]


_whole: Callable[..., tuple[torch.Tensor, ...]] = Whole.apply


class _Own(torch.autograd.Function):
    """What this rank's shards are of a whole tensor that every rank has; its own backward puts the whole together."""

    @staticmethod
    def forward(ctx: Any, plan: TransferPlan, way: Way, dtype: torch.dtype, whole: torch.Tensor) -> Any:
        """A tensor for each shard, zeros where another rank has the first replica; then a zero for the anchor."""
        layout, rank = plan.src, dist.get_rank()
        ctx.plan, ctx.dtype, ctx.way = plan, dtype, way
        ctx.counts = [layout.is_first(row) for row in layout.rows_on(rank)]
        made = []
        for row, counts in zip(layout.rows_on(rank), ctx.counts, strict=True):
            part = whole[layout.index(row)].clone()
            made.append(part if counts else torch.zeros_like(part))
        anchor = torch.zeros((), device=whole.device)
        ctx.save_for_backward(anchor)
        return *made, anchor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """From the first replicas of all shards."""
        plan = make_plan(ctx.plan.src.once, ctx.plan.dst)
        *parts, anchor = all_depending(grads, ctx)
        first = [part for part, counts in zip(parts, ctx.counts, strict=True) if counts]
        whole, after = _whole(plan, ctx.way.backward(plan, ctx.dtype), ctx.dtype, *first, anchor)
        if torch.is_grad_enabled():
            passed(after)
        return None, None, None, whole


_own: Callable[..., tuple[torch.Tensor, ...]] = _Own.apply


def own_parts(whole: torch.Tensor, layout: Layout, everywhere: Layout, group: ProcessGroup) -> list[torch.Tensor]:
    """This rank's parts of a plain tensor that lies on every rank, and an anchor.

    Each element is in one part. So its gradient is put together from all of them, and nothing is added up.
    """
    return list(_own(make_plan(layout, everywhere), Way(group), whole.dtype, whole))


class SumOfReplicas(torch.autograd.Function):
    """For each local tensor of a layout the sum over all replicas; its backward is the same again."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, group: ProcessGroup, dtype: torch.dtype, *tensors: torch.Tensor) -> Any:
        """The sums, then an anchor; the last tensor is an anchor too."""
        ctx.layout, ctx.group, ctx.dtype = layout, group, dtype
        agreed = agreed_sum(group, layout.outline, dtype)
        sums = ReplicaSums(layout, tensors[:-1], group, dtype=dtype, **agreed).wait()
        anchor = torch.zeros((), device=tensors[-1].device)
        ctx.save_for_backward(anchor)
        return *sums, anchor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """What each replica brought is in the sum of all of them."""
        return None, None, None, *sums_in_backward(ctx.layout, ctx.group, ctx.dtype, *all_depending(grads, ctx))


def sums_in_backward(
    layout: Layout, group: ProcessGroup, dtype: torch.dtype, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The sums over replicas in a backward, which may be recorded."""
    outs = sum_of_replicas(layout, group, dtype, *tensors)
    if torch.is_grad_enabled():
        passed(outs[-1])
    return outs


sum_of_replicas: Callable[..., tuple[torch.Tensor, ...]] = SumOfReplicas.apply


class Shared(torch.autograd.Function):
    """The same tensors; in the backward, the gradients of all replicas are added up and given to each of them."""

    @staticmethod
    def forward(
        ctx: Any, layout: Layout, group: ProcessGroup, dtype: torch.dtype, is_leaf: bool, *tensors: torch.Tensor
    ) -> Any:
        """The local tensors of a layout, which may be those of a leaf; the last tensor is an anchor."""
        ctx.layout, ctx.group, ctx.dtype, ctx.is_leaf = layout, group, dtype, is_leaf
        made = tuple(tensor.view_as(tensor) for tensor in tensors)
        ctx.save_for_backward(made[-1])
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The sums; those of a leaf may come to it at the end of the backward."""
        *parts, anchor = all_depending(grads, ctx)
        if ctx.is_leaf and put_off(ctx, ctx.layout, ctx.group, ctx.dtype, parts):
            return None, None, None, None, *[None] * len(parts), anchor
        return None, None, None, None, *sums_in_backward(ctx.layout, ctx.group, ctx.dtype, *parts, anchor)


_share: Callable[..., tuple[torch.Tensor, ...]] = Shared.apply


class _CountedOnce(torch.autograd.Function):
    """The same tensor; in the backward, the gradient, or zeros where another rank brings it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, counts: bool) -> torch.Tensor:
        """A view, and whether the gradient from here counts."""
        ctx.counts = counts
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Where every rank has the whole gradient, and what the ranks bring is added up, one of them brings it."""
        return (grads[0] if ctx.counts else torch.zeros_like(grads[0])), None


counted_once: Callable[[torch.Tensor, bool], torch.Tensor] = _CountedOnce.apply


def new_anchor(device: torch.device) -> torch.Tensor:
    """A scalar that stands in the graph of a rank for tensors that it does not have.

    It lies where they would: autograd goes through the nodes of one device in order, which the collectives rely on.
    """
    if device.type not in ("cpu", "meta"):
        device = torch.device(device.type, torch.get_device_module(device.type).current_device())
    return torch.zeros((), requires_grad=True, device="cpu" if device.type == "meta" else device)


def recorded(tensor: Wrapper) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """The local tensors to compute with, and the anchor.

    A leaf with replicas is shared: whatever is computed from which replica, each of them gets the whole gradient, so
    that an optimizer keeps them the same.
    """
    group = tensor._frame.process_group
    if group is None or not tensor._layout.has_replicas or not wants_graph(tensor) or not tensor.is_leaf:
        return tensor._local_tensors(), tensor._anchored()
    return shared_replicas(tensor, group, is_leaf=True)


def shared_replicas(
    tensor: Wrapper, group: ProcessGroup, *, is_leaf: bool = False
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Local tensors and anchor whose gradients are added up over all replicas and then given to each."""
    layout, anchor = tensor._layout, tensor._anchored()
    anchor = new_anchor(tensor.device) if anchor is None else anchor
    *shared, anchor = _share(layout, group, tensor.dtype, is_leaf, *tensor._local_tensors(), anchor)
    return shared, anchor


def moved_locals(
    tensors: Sequence[torch.Tensor],
    anchor: torch.Tensor | None,
    plan: TransferPlan,
    way: Way,
    dtype: torch.dtype,
    *,
    record: bool,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """Local tensors of the plan's destination; recorded by autograd, an anchor comes with them."""
    if plan.dst.some_device.type == "meta":  # nothing to move; every rank knows that
        way.ready()
        return empty_tensors(plan.dst, dtype), None
    if not record:
        return move(plan, tensors, dtype=dtype, **way.options()).wait(), None
    anchor = new_anchor(plan.src.some_device) if anchor is None else anchor
    *outs, anchor = _apply(plan, way, dtype, *tensors, anchor)
    return outs, anchor


def wants_graph(tensor: Wrapper) -> bool:
    """Whether a transfer of this tensor must be recorded. The same on every rank, whatever it holds."""
    return torch.is_grad_enabled() and tensor.requires_grad


def note_write(tensor: Wrapper, anchor: torch.Tensor) -> None:
    """Let a tensor into which recorded values were written, and all that it is a view of, be recorded on every rank.

    The shards that were written to are. All others are made to depend on the anchor, which leads to the backward of the
    write; a tensor without shards here takes the anchor on. Else a rank that holds nothing of a view, or uses only what
    was not written, would not run that backward, and ranks would not agree on which parts of the tensor want a
    gradient. Every rank calls it.
    """
    one: Wrapper | None = tensor
    written = [_memory(local) for local in tensor._local_tensors()]
    while one is not None:
        tensors = one._local_tensors()
        for local in tensors:
            memory = _memory(local)
            if not local.requires_grad or not any(memory is other for other in written):
                written.append(memory)
                nothing = local[:0] if local.ndim else local.view(1)[:0]
                nothing.copy_(anchor.to(nothing.device, nothing.dtype).expand(nothing.shape))
        if not tensors:
            before = one._anchored()
            one._wants_grad, one._anchor = True, anchor if before is None else before + anchor.to(before.device)
        one = one._view_of


def _memory(local: torch.Tensor) -> torch.Tensor:
    """The tensor that autograd takes a local tensor for a view of, or the local tensor itself."""
    return local if local._base is None else local._base


def moved_tensors(tensor: Wrapper, plan: TransferPlan, way: Way) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """The local tensors of the plan's destination, recorded by autograd if need be, and the anchor if recorded."""
    if tensor.is_meta:  # nothing to move; every rank knows that, for the layout says so
        way.ready()
        return empty_tensors(plan.dst, tensor.dtype), None
    tensors, anchor = recorded(tensor)
    return moved_locals(tensors, anchor, plan, way, tensor.dtype, record=wants_graph(tensor))
