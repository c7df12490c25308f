"""Sending what a plan says: by a collective of the backend's own, in one exchange of messages, or in rounds.

On an accelerator a plan that is a collective is carried by the backend's own. Else all that one rank has for another is
one message, and all messages go in one exchange, straight from the source and into the destination if they lie there
whole. Under a limit of extra memory they are cut into segments that go in rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.comm.group import require_member, sends, without_data
from shardwise.comm.tracing import record
from shardwise.comm.transfer.all_to_all import AllToAll
from shardwise.comm.transfer.bounded import Bounded, BoundedTransfer
from shardwise.comm.transfer.collectives import own_collective
from shardwise.comm.transfer.in_graph import refuse_tracers, transfer_ops
from shardwise.comm.transfer.local_copies import Done, Tell, copy_own, tell_all
from shardwise.comm.transfer.operands import TransferOperands
from shardwise.comm.transfer.plan import TransferPlan
from shardwise.comm.transfer.planned import PlannedTransfer, planned_transfer
from shardwise.comm.transfer.wire import failing_together, unrecorded, when_ready
from shardwise.layout import Layout


class Moving(Protocol):
    """A transfer under way."""

    def wait(self) -> list[torch.Tensor]:
        """Finish, and give the local tensors of the destination."""


def move(
    plan: TransferPlan,
    tensors: Sequence[torch.Tensor],
    process_group: ProcessGroup,
    *,
    dtype: torch.dtype,
    outs: list[torch.Tensor] | None = None,
    max_bytes: int | None = None,
    ready: Callable[[], object] = lambda: None,
    fill: Any = None,
    tell: Tell | None = None,
    verb: str = "a transfer",
    lent: bool = False,
) -> Moving:
    """Begin to move this rank's tensors of the source layout into tensors of the destination layout.

    Every rank of the group calls it. ``outs`` are the destination's tensors, made here when not given. Elements that
    nothing is moved to hold ``fill``, if there are any; where a plan sums, they hold 0, and nothing of what ``outs``
    held before is added. With ``tell``, the data goes that way. The verb is what errors call it. With ``lent``, the
    caller drops the memory of ``outs`` after an error, so messages may be received straight into it. A trace that is
    on gets an entry, if anything is sent.
    """
    ops = transfer_ops.get()
    if ops is not None:
        made = ops.move(plan, tensors, process_group, dtype=dtype, max_bytes=max_bytes, fill=fill)
        with torch.no_grad():
            for out, one in zip(outs or (), made, strict=outs is not None):
                out.copy_(one)
        return Done(made if outs is None else outs)
    refuse_tracers(process_group)
    begun = _begin_traced(plan, dtype.itemsize) if record.running and plan.moved and tell is None else None
    moving: Moving | None = None
    if plan.moved and tell is None:
        planned = planned_transfer(process_group, plan, dtype)
        if max_bytes is None if without_data() else not planned.is_fake:
            moving = _begun(planned, tensors, outs, max_bytes, ready, fill, verb, lent)
    if moving is None:
        moving = _unsent(plan, tensors, process_group, dtype, outs, ready, fill, tell)
    return moving if begun is None else _Traced(moving, begun)


def _unsent(
    plan: TransferPlan,
    tensors: Sequence[torch.Tensor],
    group: ProcessGroup,
    dtype: torch.dtype,
    outs: list[torch.Tensor] | None,
    ready: Callable[[], object],
    fill: Any,
    tell: Tell | None,
) -> Done:
    """A transfer for which no message is sent."""
    if outs is None:
        outs = empty_tensors(plan.dst, dtype, fill=0 if plan.sums else fill)
    operands = TransferOperands(plan, tensors, outs, group, dtype)
    with torch.no_grad():
        if without_data():
            ready() if tell is None else tell(b"")  # a forecast notes the meeting
            return Done(outs)  # as they would be
        require_member(group)
        if tell is not None:
            return tell_all(operands, tell)
        ready()
        return copy_own(operands)


def _begun(
    planned: PlannedTransfer,
    tensors: Sequence[torch.Tensor],
    outs: list[torch.Tensor] | None,
    max_bytes: int | None,
    ready: Callable[[], object],
    fill: Any,
    verb: str,
    lent: bool,
) -> Moving:
    """A transfer in which something is sent. The other ranks count on this one from now on."""
    plan, group = planned.plan, planned.group
    owned = outs is None or lent or not planned.is_tagged
    all_are_ready = when_ready(group, ready, planned.said(max_bytes, verb), at_once=max_bytes is None)
    with failing_together(group), unrecorded():
        if outs is None:
            outs = planned.made()
            if fill is not None and not plan.sums:
                for out in outs:
                    out.fill_(fill)
        operands = TransferOperands(plan, tensors, outs, group, planned.dtype)
        if max_bytes is None or not sends(group):
            own = own_collective(planned)
            if own is None:
                return AllToAll(operands, planned, all_are_ready, owned=owned)
            return own(operands, planned, all_are_ready)
        if plan.sums:
            for out in outs:
                out.zero_()
        return Bounded(BoundedTransfer(operands, all_are_ready, max_bytes))


def empty_tensors(layout: Layout, dtype: torch.dtype, *, fill: Any = None) -> list[torch.Tensor]:
    """New local tensors for this rank's boxes of a layout, filled with a value if one is given."""
    boxes = _local_boxes(layout, dist.get_rank())
    made = [torch.empty(size, dtype=dtype, device=device) for size, device in boxes]
    return made if fill is None else [tensor.fill_(fill) for tensor in made]


@lru_cache(maxsize=1024)
def _local_boxes(layout: Layout, rank: int) -> list[tuple[list[int], torch.device]]:
    """The size of each box that a rank holds, and its device."""
    return [(layout.extent(row), layout.place(row).device) for row in layout.rows_on(rank)]


# Transfers in a trace -------------------------------------------------------------------------------------------------


def _begin_traced(plan: TransferPlan, size: int) -> record.Begun | None:
    rank = dist.get_rank()
    to = {peer: elements * size for peer, elements in plan.sent_to(rank).items()}
    said = {"in_all": plan.moved * size, "least": plan.lower_bound * size, "to": to}
    return record.begin(_kind(plan), plan.sent(rank) * size, plan.received(rank) * size, **said)


def _kind(plan: TransferPlan) -> str:
    """By the name that the pattern has: all to everybody, sums to whom they belong, or any other exchange."""
    if plan.sums and _is_whole(plan.src):
        return "reduce-scatter"
    return "all-gather" if not plan.sums and _is_whole(plan.dst) else "exchange"


def _is_whole(layout: Layout) -> bool:
    """Whether several ranks hold all of the tensor, and nobody a part."""
    return len(layout) > 1 and layout.elements == len(layout) * layout.size.numel()


class _Traced:
    """A transfer under way, and its entry in a trace."""

    def __init__(self, moving: Moving, begun: record.Begun) -> None:
        self._moving, self._begun = moving, begun
        self._is_over = False

    def wait(self) -> list[torch.Tensor]:
        """Finish, and give the local tensors of the destination."""
        if not self._is_over:
            self._begun.waits()
        outs = self._moving.wait()
        if not self._is_over:
            self._begun.end()
        self._is_over = True
        return outs
