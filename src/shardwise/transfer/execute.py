"""Sending what a plan says: by a collective of the backend's own, in one exchange of messages, or in rounds.

On an accelerator a plan that is a collective is carried by the backend's own. Else all that one rank has for another is
one message, and all go in one exchange of bytes, straight from the source and into the destination if they lie there
whole. Under a limit of extra memory they are cut into segments that go in rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.layout import Layout
from shardwise.meeting import is_tagged
from shardwise.process_group import is_fake, sends, without_data
from shardwise.transfer.all_to_all import AllToAll
from shardwise.transfer.collectives import own_collective
from shardwise.transfer.exchange import failing_together, when_ready
from shardwise.transfer.plan import TransferPlan
from shardwise.transfer.rounds import InRounds, PointToPoint
from shardwise.transfer.unsent import Done, Tell, copy_own, tell_all
from shardwise.transfer.wire import said_of


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
) -> Moving:
    """Begin to move this rank's tensors of the source layout into tensors of the destination layout.

    Every rank of the group calls it. ``outs`` are the destination's tensors, made here when not given. Elements that
    nothing is moved to hold ``fill``, if there are any; where a plan sums, they hold 0, and nothing of what ``outs``
    held before is added. With ``tell``, the data goes that way. The verb is what errors call it.
    """
    if plan.moved and tell is None and not is_fake(process_group) and not without_data():
        return _begun(plan, tensors, process_group, dtype, outs, max_bytes, ready, fill, verb)
    if outs is None:
        outs = empty_tensors(plan.dst, dtype, fill=0 if plan.sums else fill)
    with torch.no_grad():
        if without_data():
            ready()
            return Done(outs)  # as they would be
        if tell is not None:
            return tell_all(plan, tensors, outs, process_group, dtype, tell)
        ready()
        return copy_own(plan, tensors, outs)


def _begun(
    plan: TransferPlan,
    tensors: Sequence[torch.Tensor],
    group: ProcessGroup,
    dtype: torch.dtype,
    outs: list[torch.Tensor] | None,
    max_bytes: int | None,
    ready: Callable[[], object],
    fill: Any,
    verb: str,
) -> Moving:
    """A transfer in which something is sent. The other ranks count on this one from now on."""
    owned = outs is None or not is_tagged(group)
    all_are_ready = when_ready(group, ready, said_of(plan, dtype, max_bytes, verb))
    with failing_together(group), torch.no_grad():
        if outs is None:
            outs = empty_tensors(plan.dst, dtype, fill=None if plan.sums else fill)
        if max_bytes is None or not sends(group):
            own = own_collective(plan, group, dtype)
            if own is not None:
                return own(plan, tensors, outs, group, dtype, all_are_ready)
            return AllToAll(plan, tensors, outs, group, dtype, all_are_ready, owned=owned)
        if plan.sums:
            for out in outs:
                out.zero_()
        return InRounds(PointToPoint(plan, tensors, outs, group, dtype, all_are_ready, max_bytes))


def empty_tensors(layout: Layout, dtype: torch.dtype, *, fill: Any = None) -> list[torch.Tensor]:
    """New local tensors for this rank's boxes of a layout, filled with a value if one is given."""
    made = [torch.empty(size, dtype=dtype, device=device) for size, device in _local_boxes(layout, dist.get_rank())]
    return made if fill is None else [tensor.fill_(fill) for tensor in made]


@lru_cache(maxsize=1024)
def _local_boxes(layout: Layout, rank: int) -> list[tuple[list[int], torch.device]]:
    """The size of each box that a rank holds, and its device."""
    return [(layout.extent(row), layout.place(row).device) for row in layout.rows_on(rank)]
