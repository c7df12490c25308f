"""Rows that go to the ranks which values decide, such as tokens to experts.

The ranks first exchange how many rows each has for each other one, then the rows, in exact numbers: nothing is padded.
Several tensors with the same rows, of any widths and dtypes, travel in one message for each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.distributed import ProcessGroup

from shardwise.comm.agreement import begin_sending
from shardwise.comm.group import CallFingerprint, group_ranks, is_fake, without_data
from shardwise.comm.tracing import record
from shardwise.comm.transfer.in_graph import refuse_in_graph
from shardwise.comm.transfer.views import as_bytes, resolved
from shardwise.comm.transfer.wire import exchange, failing_together, wire_device


@dataclass(frozen=True, eq=False)
class RowCounts:
    """How many rows this rank sends to each member of a group, in group order, and how many it gets from each."""

    group: ProcessGroup
    sent: tuple[int, ...]
    received: tuple[int, ...]
    known: bool = True  # False in a forecast, where they are assumed

    def reverse(self) -> RowCounts:
        """Of the way back."""
        return RowCounts(self.group, self.received, self.sent, self.known)


def exchange_numbers(
    group: ProcessGroup, numbers: torch.Tensor, verb: str
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Give each member its row of numbers, and get one from each: the columns that were sent, and that came.

    Every rank of the group calls it, with int64 numbers of one size. The host waits once, for all of them.
    """
    refuse_in_graph(verb)
    came = numbers
    if group.size() > 1 and not is_fake(group) and not without_data():
        wire = wire_device(frozenset((numbers.device.type,)), group)
        with failing_together(group):
            given = numbers.to(wire).contiguous()
            came = torch.empty_like(given)
            tag = begin_sending(group, _said(verb, numbers.shape[1]))
        size = given[0].nbytes * (group.size() - 1)
        with record.waiting("meeting", size, size):
            exchange(group, as_bytes(came).chunk(len(came)), as_bytes(given).chunk(len(given)), tag, verb).wait()
        numbers = given
    sent, received = torch.stack([numbers, came]).transpose(1, 2).tolist()
    return [tuple(column) for column in sent], [tuple(column) for column in received]


def exchange_rows(counts: RowCounts, tensors: Sequence[torch.Tensor], verb: str) -> list[torch.Tensor]:
    """Give each member its rows of each tensor, and get rows of each: what came, in the order of the members.

    The tensors have two dims and as many rows as are sent, in the order of the members. Every rank of the group calls
    it, with tensors of the same widths and dtypes. A result may be a view of the memory of all results.
    """
    refuse_in_graph(verb)
    group, device = counts.group, tensors[0].device
    form = RowForm.of(tuple((tensor.shape[1], tensor.dtype) for tensor in tensors))
    rows = sum(counts.received)
    begun = _begin_traced(counts, form.size) if record.running and group.size() > 1 else None
    if group.size() == 1:
        outs = list(tensors)
    elif without_data() or is_fake(group):  # other members send nothing
        outs = [tensor.new_zeros(rows, tensor.shape[1]) for tensor in tensors]
    else:
        with failing_together(group):
            wire = wire_device(frozenset((device.type,)), group)
            given, taken = form.pack(tensors, wire), form.empty(rows, wire)
            tag = begin_sending(group, _said(verb, form))
        way = exchange(group, _by_member(taken, counts.received), _by_member(given, counts.sent), tag, verb)
        if begun is not None:
            begun.waits()
        way.wait()
        with failing_together(group):
            outs = form.unpack(taken.to(device, non_blocking=True))
    if begun is not None:
        begun.end()
    return outs


def _by_member(buffer: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """The bytes of each member's rows."""
    width = buffer.shape[1]
    return list(buffer.view(-1).split_with_sizes([count * width for count in counts]))


@dataclass(frozen=True)
class RowForm:
    """How a row of several tensors lies in memory: one part behind another, each aligned to its elements."""

    parts: tuple[tuple[int, int, torch.dtype], ...]  # the bytes at which each begins and ends, and its dtype
    size: int

    @staticmethod
    @lru_cache(maxsize=256)
    def of(kinds: tuple[tuple[int, torch.dtype], ...]) -> RowForm:
        """Of parts of so many elements of these dtypes."""
        parts, end = [], 0
        for width, dtype in kinds:
            begin = _multiple(end, dtype.itemsize)
            end = begin + width * dtype.itemsize
            parts.append((begin, end, dtype))
        return RowForm(tuple(parts), _multiple(end, max(dtype.itemsize for _, dtype in kinds)))

    def empty(self, rows: int, device: torch.device) -> torch.Tensor:
        """Memory for so many rows, as bytes."""
        made = torch.empty(rows, self.size, dtype=torch.uint8, device=device)
        return record.as_buffer(made) if record.running else made

    def pack(self, tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
        """The rows of these tensors as bytes; of one tensor as they lie, if they may be sent so."""
        if len(tensors) == 1:
            (one,) = tensors
            return as_bytes(resolved(one.to(device)).contiguous()).view(len(one), self.size)
        buffer = self.empty(len(tensors[0]), device)
        for part, tensor in zip(self.unpack(buffer), tensors, strict=True):
            part.copy_(tensor)
        return buffer

    def unpack(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of rows that lie so, as views."""
        return [buffer[:, begin:end].view(dtype) for begin, end, dtype in self.parts]


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


@lru_cache(maxsize=256)
def _said(verb: str, form: object) -> CallFingerprint:
    """What all ranks must say alike."""
    return CallFingerprint({"verb": verb, "of": str(form)})


def _begin_traced(counts: RowCounts, size: int) -> record.Begun | None:
    here = counts.group.rank()
    ranks = group_ranks(counts.group)
    to = {ranks[k]: count * size for k, count in enumerate(counts.sent) if k != here and count}
    received = (sum(counts.received) - counts.received[here]) * size
    return record.begin("exchange", sum(to.values()), received, to=to, known=counts.known)
