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
from shardwise.comm.transfer.views import as_bytes, is_as_it_lies, resolved
from shardwise.comm.transfer.wire import exchange_rows_of, failing_together, wire_device


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

    The numbers are int64, contiguous, of size ``(2, members, columns)``: any for what will come, then what is sent.
    Every rank of the group calls it, with as many columns. The host waits once, for all of them.
    """
    refuse_in_graph(verb)
    if group.size() == 1 or is_fake(group) or without_data():
        numbers = numbers[1:].expand_as(numbers)
    else:
        with failing_together(group):
            numbers = _on(numbers, wire_device(frozenset((numbers.device.type,)), group))
            came, given = numbers.unbind()
            call = begin_sending(group, _said(verb, numbers.shape[2]))
        size = given.nbytes // len(given) * (group.size() - 1)
        each = (1,) * len(given)
        with record.waiting("meeting", size, size):
            exchange_rows_of(group, _rows_as_bytes(came), each, _rows_as_bytes(given), each, call, verb).wait()
    received, sent = numbers.tolist()
    return list(zip(*sent, strict=True)), list(zip(*received, strict=True))


def exchange_rows(
    counts: RowCounts, tensors: Sequence[torch.Tensor], verb: str, *, index: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Give each member its rows of each tensor, and get rows of each: what came, in the order of the members.

    The tensors have two dims and as many rows as are sent, in the order of the members; or the rows that are sent are
    those at an index. Every rank of the group calls it, with tensors of the same widths and dtypes. A result may be a
    view of the memory of all results.
    """
    refuse_in_graph(verb)
    group, device = counts.group, tensors[0].device
    form = RowForm.of(tuple((tensor.shape[1], tensor.dtype) for tensor in tensors))
    rows = sum(counts.received)
    begun = _begin_traced(counts, form.size) if record.running and group.size() > 1 else None
    if group.size() == 1:
        outs = list(tensors) if index is None else [tensor.index_select(0, index) for tensor in tensors]
    elif without_data() or is_fake(group):  # other members send nothing
        outs = [tensor.new_zeros(rows, tensor.shape[1]) for tensor in tensors]
    else:
        with failing_together(group):
            wire = wire_device(frozenset((device.type,)), group)
            given, taken = form.pack(tensors, wire, index), form.empty(rows, wire)
            call = begin_sending(group, _said(verb, form))
        way = exchange_rows_of(group, taken, counts.received, given, counts.sent, call, verb)
        if begun is not None:
            begun.waits()
        way.wait()
        with failing_together(group):
            outs = form.unpack(_on(taken, device))
    if begun is not None:
        begun.end()
    return outs


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device; itself if it is there."""
    return tensor if tensor.device == device else tensor.to(device, non_blocking=device.type != "cpu")


def _rows_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of a contiguous tensor of two dims, as rows of bytes that share its memory."""
    if tensor.stride(1) == 1 and is_as_it_lies(tensor):
        return tensor.view(torch.uint8)
    rows, width = tensor.shape
    return as_bytes(resolved(tensor)).view(rows, width * tensor.element_size())


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

    def pack(
        self, tensors: Sequence[torch.Tensor], device: torch.device, index: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The rows of these tensors, or those at an index, as bytes; of one tensor as they lie, if they may be sent so.

        Rows at an index are written straight into the memory that is sent.
        """
        if index is not None and (len(tensors) == 1 or tensors[0].device != device):
            return self.pack([tensor.index_select(0, index) for tensor in tensors], device)
        if len(tensors) == 1:
            return _rows_as_bytes(_on(tensors[0], device).contiguous())
        buffer = self.empty(len(tensors[0] if index is None else index), device)
        for part, tensor in zip(self.unpack(buffer), tensors, strict=True):
            if index is None:
                part.copy_(tensor)
            else:
                torch.index_select(tensor, 0, index, out=part)
        return buffer

    def unpack(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of rows that lie so, as views."""
        if len(self.parts) == 1:
            return [buffer.view(self.parts[0][2])]
        typed: dict[torch.dtype, torch.Tensor] = {}
        found = []
        for begin, end, dtype in self.parts:
            whole = typed.get(dtype)
            if whole is None:
                whole = typed[dtype] = buffer.view(dtype)
            size = dtype.itemsize
            sizes, strides = (len(buffer), (end - begin) // size), (self.size // size, 1)
            found.append(whole.as_strided(sizes, strides, whole.storage_offset() + begin // size))
        return found


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
