"""Transfers under autograd: the backward of a transfer is the reverse transfer, on every rank, whatever it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise import settings
from shardwise.autograd.anchors import anchor_gradient, input_anchor, output_anchor, wants_graph
from shardwise.autograd.buckets import compared
from shardwise.autograd.recorded_backward import depending, register_anchor, sendable
from shardwise.autograd.replicas import recorded
from shardwise.comm.transfer import Tell, TransferPlan, empty_tensors, make_plan, move
from shardwise.layout import Layout

if TYPE_CHECKING:
    from shardwise.tensor.wrapper import Wrapper


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


class Transferred(torch.autograd.Function):
    """A transfer. Its backward is the reverse transfer, a collective, which runs on every rank by the anchors.

    A transfer that gives a plain tensor, the whole on every rank, has the whole gradient on every rank too. Then the
    backward moves nothing: every rank takes the part of its own shards.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: TransferPlan,
        way: Way,
        dtype: torch.dtype,
        gives_plain: bool,
        anchor: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> Any:
        """An anchor, then the destination's local tensors; the inputs are an anchor and the source's."""
        ctx.plan, ctx.dtype, ctx.way, ctx.gives_plain = plan, dtype, way.kept(), gives_plain
        outs = move(plan, tensors, dtype=dtype, **way.options()).wait()
        return output_anchor(ctx, anchor, tensors), *outs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The gradients on their way back; what went to several replicas is added up."""
        if ctx.gives_plain:
            saved = ctx.saved_tensors[0]  # unpacked on every rank alike
            anchor, *parts = _own(ctx.plan, ctx.way, ctx.dtype, depending(grads[1], saved))
        else:
            plan = ctx.plan.reverse()
            way = ctx.way.backward(plan, ctx.dtype)
            anchor, *parts = _moved(plan, way, ctx.dtype, False, *sendable(grads, ctx))
        register_anchor(anchor)
        return None, None, None, None, anchor_gradient(ctx, 4, anchor), *parts


_moved: Callable[..., tuple[torch.Tensor, ...]] = Transferred.apply  # which torch declares without types


class _Own(torch.autograd.Function):
    """What this rank's shards are of a whole tensor that every rank has; its own backward puts the whole together."""

    @staticmethod
    def forward(ctx: Any, plan: TransferPlan, way: Way, dtype: torch.dtype, whole: torch.Tensor) -> Any:
        """An anchor, then a tensor for each shard: zeros where another rank has the first replica."""
        layout, rank = plan.src, dist.get_rank()
        ctx.plan, ctx.dtype, ctx.way = plan, dtype, way
        ctx.counts = [layout.is_first(row) for row in layout.rows_on(rank)]
        made = []
        for row, counts in zip(layout.rows_on(rank), ctx.counts, strict=True):
            part = whole[layout.index(row)].clone()
            made.append(part if counts else torch.zeros_like(part))
        return output_anchor(ctx, whole), *made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """From the first replicas of all shards."""
        plan = make_plan(ctx.plan.src.once, ctx.plan.dst)
        anchor, *parts = sendable(grads, ctx)
        first = [part for part, counts in zip(parts, ctx.counts, strict=True) if counts]
        anchor, whole = _moved(plan, ctx.way.backward(plan, ctx.dtype), ctx.dtype, True, anchor, *first)
        register_anchor(anchor)
        return None, None, None, whole


_own: Callable[..., tuple[torch.Tensor, ...]] = _Own.apply


def own_parts(whole: torch.Tensor, layout: Layout, everywhere: Layout, group: ProcessGroup) -> list[torch.Tensor]:
    """This rank's parts of a plain tensor that lies on every rank, and an anchor.

    Each element is in one part. So its gradient is put together from all of them, and nothing is added up.
    """
    anchor, *parts = _own(make_plan(layout, everywhere), Way(group), whole.dtype, whole)
    return [*parts, anchor]


def whole_of(
    plan: TransferPlan, way: Way, dtype: torch.dtype, anchor: torch.Tensor | None, tensors: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The whole tensor on every rank, as a plain one; the plan goes from its shards to all of it on each rank."""
    return _moved(plan, way, dtype, True, input_anchor(anchor, tensors, plan.src.some_device), *tensors)[1]


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
    anchor = input_anchor(anchor, tensors, plan.src.some_device)
    anchor, *outs = _moved(plan, way, dtype, False, anchor, *tensors)
    return outs, anchor


def moved_tensors(tensor: Wrapper, plan: TransferPlan, way: Way) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """The local tensors of the plan's destination, recorded by autograd if need be, and the anchor if recorded."""
    if tensor.is_meta:  # nothing to move; every rank knows that, for the layout says so
        way.ready()
        return empty_tensors(plan.dst, tensor.dtype), None
    tensors, anchor = recorded(tensor)
    return moved_locals(tensors, anchor, plan, way, tensor.dtype, record=wants_graph(tensor))
