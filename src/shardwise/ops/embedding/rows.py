"""Rows of a sharded table by their ids: asked of the ranks that hold them, and values for them, sent there.

Ids are in ascending order, so that those of a range of rows are one slice. Three all-to-alls bring the rows: of how
many ids, of the ids, and of what was asked for. One more takes the gradients back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed import ProcessGroup

from shardwise.geometry import IntArray
from shardwise.meeting import raise_lost
from shardwise.ops.embedding.pieces import Pieces, packed
from shardwise.ops.embedding.route import Columns, route_among
from shardwise.process_group import Said, begin_sending, is_fake
from shardwise.sharded_tensor import ShardedTensor
from shardwise.tracing import record
from shardwise.transfer.exchange import wire_device
from shardwise.transfer.views import as_bytes, resolved
from shardwise.transfer.wire import exchange


class Table:
    """A sharded tensor with two dims, as a rank of its group sees it: who has which rows, and the wire to them."""

    def __init__(self, weight: ShardedTensor, group: ProcessGroup) -> None:
        layout = weight._layout
        self.group, self.width, self.dtype, self.outline = group, weight.shape[1], weight.dtype, layout.outline
        self.route = route_among(layout, group)
        self.wire = wire_device(layout.places.device_types, group)
        self._said = Said({"verb": "an exchange of ids or rows of a table", "table": self.outline, "dtype": self.dtype})

    def swap(self, given: torch.Tensor, out: IntArray, into: IntArray) -> torch.Tensor:
        """What each member has for this rank, in exchange for what this rank has for each: so many elements."""
        taken = torch.empty(int(into.sum()), dtype=given.dtype, device=self.wire)
        if is_fake(self.group):  # the others ask for nothing, and have nothing
            own_out, own_into = (_own_slice(counts, self.route.here) for counts in (out, into))
            taken.zero_()[own_into] = given.reshape(-1)[own_out]
            return taken
        sent = as_bytes(resolved(given.to(self.wire)).contiguous())
        came, went = ((counts * given.element_size()).tolist() for counts in (into, out))
        try:
            tag, here = begin_sending(self.group, self._said), self.route.here
            messages = as_bytes(taken).split_with_sizes(came), sent.split_with_sizes(went)
            with record.waiting("exchange", sum(went) - went[here], sum(came) - came[here]):
                exchange(self.group, *messages, tag).wait()
        except (RuntimeError, TimeoutError) as error:
            raise_lost(f"exchange {sent.numel():,} bytes of ids or rows of a sharded table", error, self.group)
        return taken


def _own_slice(counts: IntArray, here: int) -> slice:
    """Of what all members have, one after the other, the part of this one."""
    begin = int(counts[:here].sum())
    return slice(begin, begin + int(counts[here]))


class Arrived(NamedTuple):
    """What all ranks have for one local tensor."""

    local: int
    first: int  # the id of its first row
    rows: torch.Tensor  # which rows of it; the same one may come from several ranks
    counts: torch.Tensor | None  # how often each was looked up on the rank that it comes from
    values: torch.Tensor


class Exchange:
    """Ids that have been told to the ranks that hold their rows: to one replica of each, or everywhere.

    Every rank of the group makes one, with ids of its own, and calls its methods.
    """

    def __init__(
        self, table: Table, ids: torch.Tensor, counts: torch.Tensor | None = None, *, everywhere: bool = False
    ) -> None:
        route = table.route
        self._table, self._length, self._device = table, len(ids), ids.device
        self.stays = route.at_home and not everywhere
        # The bands that this rank asks for anything, and where their ids are among ours.
        edges = torch.searchsorted(ids, route.edges.to(ids.device)).numpy(force=True)
        self._bands, self._begins, self._ends = route.between(edges, everywhere=everywhere)
        self._lengths = self._ends - self._begins
        self._numbers = self._tell_numbers()
        # How many ids this rank has for each member, and each member for this rank.
        self._asked, self._held = self._by_member(self._lengths), self._numbers.sum(axis=1)
        told = self._tell(ids[:, None] if counts is None else torch.stack([ids, counts], dim=1))
        self._rows = [message[:, 0] - first for message, first in zip(told, route.first_ids, strict=True)]
        self._counts = [None if counts is None else message[:, 1] for message in told]

    def fetch(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The rows of the ids, whole, from the local tensors of all ranks."""
        table, (asked, held) = self._table, self._sizes
        taken = self._swap(packed(self._asked_for(tensors), table.dtype, table.wire), held, asked)
        return self._pieces.unpack(taken, self._device)

    def _asked_for(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The rows that each member asks of each local tensor, one member after the other."""
        values = []
        for cell in self._table.route.cells:
            local = tensors[cell.local]
            values.append(local.index_select(0, self._rows[cell.band].to(local.device)))
        if len(values) == 1:
            return values
        numbers = self._of_cells
        parts = [
            iter(torch.split_with_sizes(value, column[column > 0].tolist()))
            for value, column in zip(values, numbers.T, strict=True)
        ]
        return [next(parts[cell]) for cell in numbers.nonzero()[1].tolist()]

    def give(self, rows: torch.Tensor) -> list[Arrived]:
        """What all ranks have for each local tensor, for the rows that they asked for."""
        table, (asked, held) = self._table, self._sizes
        taken = self._swap(self._pieces.pack(rows, table.wire), asked, held)
        cells, first_ids = table.route.cells, table.route.first_ids
        sizes = self._of_cells * table.route.cell_widths
        return [
            Arrived(
                cell.local,
                first_ids[cell.band],
                self._rows[cell.band],
                self._counts[cell.band],
                values.view(-1, cell.width),
            )
            for cell, values in zip(cells, _sorted_out(taken, sizes), strict=True)
        ]

    def _tell_numbers(self) -> IntArray:
        """For each member, how many ids it has for each band of this rank."""
        route = self._table.route
        lengths = np.zeros(len(route.member_of), dtype=np.int64)
        lengths[self._bands] = self._lengths
        shape = (route.members, len(route.first_ids))
        if self.stays:
            own: IntArray = np.zeros(shape, dtype=np.int64)
            own[route.here] = lengths[route.own]
            return own
        into = np.full(route.members, shape[1])
        taken = self._table.swap(torch.from_numpy(lengths), route.bands_of_each, into)
        numbers: IntArray = taken.view(shape).numpy(force=True)
        return numbers

    @property
    def _of_cells(self) -> IntArray:
        """For each member, how many rows it asks of each local tensor."""
        return self._numbers[:, [cell.band for cell in self._table.route.cells]]

    def _tell(self, message: torch.Tensor) -> list[torch.Tensor]:
        """For each band of this rank, what all members say of its ids, a row for each."""
        columns = message.shape[1]
        pieces = Pieces((self._length, columns), (self._begins, self._ends))
        given = pieces.pack(message, self._table.wire)
        taken = self._swap(given, self._asked * columns, self._held * columns)
        return _sorted_out(taken.view(-1, columns), self._numbers)

    def _swap(self, given: torch.Tensor, out: IntArray, into: IntArray) -> torch.Tensor:
        if self.stays:
            return given.to(self._table.wire).reshape(-1)
        return self._table.swap(given, out, into)

    @cached_property
    def _columns(self) -> Columns | None:
        """Of the boxes of the bands that are asked; None: each band is one box with all columns."""
        route = self._table.route
        return None if route.has_whole_rows else route.columns(self._bands)

    @cached_property
    def _pieces(self) -> Pieces:
        """The parts of whole rows that lie on each member."""
        shape = (self._length, self._table.width)
        if self._columns is None:
            return Pieces(shape, (self._begins, self._ends))
        band, begins, ends = self._columns
        return Pieces(shape, (self._begins[band], self._ends[band]), (begins, ends))

    @cached_property
    def _sizes(self) -> tuple[IntArray, IntArray]:
        """How many elements this rank asks of each member, and each member of this rank."""
        if self._columns is None:
            return self._asked * self._table.width, self._held * self._table.width
        band, begins, ends = self._columns
        widths = np.zeros(len(self._bands), dtype=np.int64)
        np.add.at(widths, band, ends - begins)
        return self._by_member(self._lengths * widths), self._of_cells @ self._table.route.cell_widths

    def _by_member(self, counts: IntArray) -> IntArray:
        """What is counted for the bands that are asked, added up for each member."""
        route = self._table.route
        total = np.zeros(route.members, dtype=np.int64)
        np.add.at(total, route.member_of[self._bands], counts)
        return total


def _sorted_out(taken: torch.Tensor, sizes: IntArray) -> list[torch.Tensor]:
    """Of pieces in turns, one of each kind from every member: all that are of each kind. A size for each of them."""
    kinds = sizes.shape[1]
    if kinds == 1:
        return [taken]
    found: list[list[torch.Tensor]] = [[] for _ in range(kinds)]
    pieces = torch.split_with_sizes(taken, sizes[sizes > 0].tolist())
    for kind, piece in zip(sizes.nonzero()[1].tolist(), pieces, strict=True):
        found[kind].append(piece)
    return [torch.cat(of_kind) if of_kind else taken[:0] for of_kind in found]
