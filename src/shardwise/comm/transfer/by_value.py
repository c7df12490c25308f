"""`RowExchange`: rows that go to the members of a group which values name, so that only the sender knows how many.

One small exchange tells all members how many rows come from whom; then rows go there, and answers come back.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.distributed import ProcessGroup

from shardwise.comm.agreement import begin_sending
from shardwise.comm.group import CallFingerprint, is_fake
from shardwise.comm.tracing import record
from shardwise.comm.transfer.views import as_bytes, resolved
from shardwise.comm.transfer.wire import exchange
from shardwise.layout.geometry import IntArray


def swap(
    group: ProcessGroup,
    given: torch.Tensor,
    counts: tuple[IntArray, IntArray],
    said: CallFingerprint,
    wire: torch.device,
    what: str,
) -> torch.Tensor:
    """Exchange elements with each member of a group: the counts say how many go there, and how many come from there.

    Every rank of the group calls it. ``wire`` is the device on which messages lie.
    """
    out, into = counts
    taken = torch.empty(int(into.sum()), dtype=given.dtype, device=wire)
    here = group.rank()
    if is_fake(group):  # other members send nothing
        own_out, own_into = (_slice_of(each, here) for each in counts)
        taken.zero_()[own_into] = given.reshape(-1)[own_out]
        return taken
    sent = as_bytes(resolved(given.to(wire)).contiguous())
    came, went = ((each * given.element_size()).tolist() for each in (into, out))
    tag = begin_sending(group, said)
    messages = as_bytes(taken).split_with_sizes(came), sent.split_with_sizes(went)
    with record.waiting("exchange", sum(went) - went[here], sum(came) - came[here]):
        exchange(group, *messages, tag, what).wait()
    return taken


def _slice_of(counts: IntArray, member: int) -> slice:
    """The slice of one member in the concatenated elements of all."""
    begin = int(counts[:member].sum())
    return slice(begin, begin + int(counts[member]))


class RowExchange:
    """So many rows of this rank for each member, and so many from each. Every rank of the group makes one."""

    def __init__(self, group: ProcessGroup, counts: IntArray, wire: torch.device, verb: str) -> None:
        self.group, self._wire, self._verb, self.out = group, wire, verb, counts
        ones = np.ones_like(counts)
        self.into: IntArray = self._swapped(torch.from_numpy(counts), ones, ones).numpy(force=True)

    def send(self, rows: torch.Tensor, *, back: bool = False) -> torch.Tensor:
        """The rows from all members, in their order; this rank's are in the order of the members that get them.

        With ``back``, the answers to rows that came: those to this rank's rows, in their order.
        """
        out, into = (self.into, self.out) if back else (self.out, self.into)
        width = rows[0].numel() if len(rows) else rows.new_empty(rows.shape[1:]).numel()
        taken = self._swapped(rows, out * width, into * width)
        return taken.to(rows.device).view(int(into.sum()), *rows.shape[1:])

    def _swapped(self, given: torch.Tensor, out: IntArray, into: IntArray) -> torch.Tensor:
        said = CallFingerprint({"verb": self._verb, "dtype": given.dtype, "row": tuple(given.shape[1:])})
        return swap(self.group, given, (out, into), said, self._wire, "rows that values send to other ranks")
