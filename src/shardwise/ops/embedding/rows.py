"""Exchanging rows of a sharded table by their ids with the ranks that hold them.

Ids are in ascending order, so the ids of a range of rows are one slice. Three all-to-alls fetch rows: of the numbers of
ids, of the ids, and of the rows. One more sends gradients back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed import ProcessGroup

from shardwise.comm.agreement import begin_sending
from shardwise.comm.group import CallFingerprint, is_fake
from shardwise.comm.tracing import record
from shardwise.comm.transfer.views import as_bytes, resolved
from shardwise.comm.transfer.wire import exchange_with_all, wire_device
from shardwise.layout.geometry import IntArray
from shardwise.ops.embedding.pieces import MatrixPieces, pack_views
from shardwise.ops.embedding.route import Columns, route_among
from shardwise.tensor import ShardedTensor


class Table:
    """A sharded tensor with two dims, as a rank of its group sees it: the route to its rows."""

    def __init__(self, weight: ShardedTensor, group: ProcessGroup) -> None:
        layout = weight._layout
        self.group, self.width, self.dtype, self.outline = group, weight.shape[1], weight.dtype, layout.outline
        self.route = route_among(group, layout)
        self.wire = wire_device(layout.places.device_types, group)
        self._said = CallFingerprint(
            {"verb": "an exchange of ids or rows of a table", "table": self.outline, "dtype": self.dtype}
        )

    def swap(self, given: torch.Tensor, out: IntArray, into: IntArray) -> torch.Tensor:
        """Exchange elements with each member: ``out`` elements for ``into``."""
        taken = torch.empty(int(into.sum()), dtype=given.dtype, device=self.wire)
        if is_fake(self.group):  # other members request nothing, and send nothing
            own_out, own_into = (_own_slice(counts, self.route.here) for counts in (out, into))
            taken.zero_()[own_into] = given.reshape(-1)[own_out]
            return taken
        sent = as_bytes(resolved(given.to(self.wire)).contiguous())
        came, went = ((counts * given.element_size()).tolist() for counts in (into, out))
        call, here = begin_sending(self.group, self._said), self.route.here
        messages = as_bytes(taken).split_with_sizes(came), sent.split_with_sizes(went)
        with record.waiting("exchange", sum(went) - went[here], sum(came) - came[here]):
            exchange_with_all(self.group, *messages, call, self.wire, "ids or rows of a sharded table").wait()
        return taken


def _own_slice(counts: IntArray, here: int) -> slice:
    """The slice of one member in the concatenated elements of all."""
    begin = int(counts[:here].sum())
    return slice(begin, begin + int(counts[here]))


class ReceivedRows(NamedTuple):
    """Rows of all ranks for one local tensor."""

    local: int
    first: int  # the id of its first row
    rows: torch.Tensor  # row numbers, which may repeat if they come from several ranks
    counts: torch.Tensor | None  # look-ups of each row on the rank that sent it
    values: torch.Tensor


class Exchange:
    """Ids that were sent to the ranks that hold their rows: to one replica of each, or to all.

    Every rank of the group makes one, with its own ids, and calls the methods.
    """

    def __init__(
        self, table: Table, ids: torch.Tensor, counts: torch.Tensor | None = None, *, everywhere: bool = False
    ) -> None:
        route = table.route
        self._table, self._length, self._device = table, len(ids), ids.device
        self.is_local = route.is_local and not everywhere
        # The bands that hold rows of these ids, and the slice of ids of each.
        edges = torch.searchsorted(ids, route.edges.to(ids.device)).numpy(force=True)
        self._bands, self._begins, self._ends = route.between(edges, everywhere=everywhere)
        self._lengths = self._ends - self._begins
        self._numbers = self._exchange_numbers()
        # The numbers of ids that this rank requests of each member, and each member of this rank.
        self._requested, self._served = self._by_member(self._lengths), self._numbers.sum(axis=1)
        messages = self._exchange_ids(ids[:, None] if counts is None else torch.stack([ids, counts], dim=1))
        self._rows = [message[:, 0] - first for message, first in zip(messages, route.first_ids, strict=True)]
        self._counts = [None if counts is None else message[:, 1] for message in messages]

    def fetch(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole rows of the ids, from the local tensors of all ranks."""
        table, (requested, served) = self._table, self._sizes
        taken = self._swap(pack_views(self._requested_rows(tensors), table.dtype, table.wire), served, requested)
        return self._pieces.unpack(taken, self._device)

    def _requested_rows(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The rows that each member requests of each local tensor, member by member."""
        values = []
        for cell in self._table.route.parts:
            local = tensors[cell.local]
            values.append(local.index_select(0, self._rows[cell.band].to(local.device)))
        if len(values) == 1:
            return values
        numbers = self._row_counts
        parts = [
            iter(torch.split_with_sizes(value, column[column > 0].tolist()))
            for value, column in zip(values, numbers.T, strict=True)
        ]
        return [next(parts[cell]) for cell in numbers.nonzero()[1].tolist()]

    def send(self, rows: torch.Tensor) -> list[ReceivedRows]:
        """Send a row for each id; the rows of all ranks for each local tensor."""
        table, (requested, served) = self._table, self._sizes
        taken = self._swap(self._pieces.pack(rows, table.wire), requested, served)
        cells, first_ids = table.route.parts, table.route.first_ids
        sizes = self._row_counts * table.route.part_widths
        return [
            ReceivedRows(
                cell.local,
                first_ids[cell.band],
                self._rows[cell.band],
                self._counts[cell.band],
                values.view(-1, cell.width),
            )
            for cell, values in zip(cells, _by_kind(taken, sizes), strict=True)
        ]

    def _exchange_numbers(self) -> IntArray:
        """The number of ids of each member for each band of this rank."""
        route = self._table.route
        lengths = np.zeros(len(route.member_of), dtype=np.int64)
        lengths[self._bands] = self._lengths
        shape = (route.members, len(route.first_ids))
        if self.is_local:
            own: IntArray = np.zeros(shape, dtype=np.int64)
            own[route.here] = lengths[route.own]
            return own
        into = np.full(route.members, shape[1])
        taken = self._table.swap(torch.from_numpy(lengths), route.bands_of_each, into)
        numbers: IntArray = taken.view(shape).numpy(force=True)
        return numbers

    @property
    def _row_counts(self) -> IntArray:
        """The number of rows that each member requests of each local tensor."""
        return self._numbers[:, [cell.band for cell in self._table.route.parts]]

    def _exchange_ids(self, message: torch.Tensor) -> list[torch.Tensor]:
        """For each band of this rank, the messages of all members, one row for each id."""
        columns = message.shape[1]
        pieces = MatrixPieces((self._length, columns), (self._begins, self._ends))
        given = pieces.pack(message, self._table.wire)
        taken = self._swap(given, self._requested * columns, self._served * columns)
        return _by_kind(taken.view(-1, columns), self._numbers)

    def _swap(self, given: torch.Tensor, out: IntArray, into: IntArray) -> torch.Tensor:
        if self.is_local:
            return given.to(self._table.wire).reshape(-1)
        return self._table.swap(given, out, into)

    @cached_property
    def _columns(self) -> Columns | None:
        """Of the boxes of the requested bands; None: each band is one box with all columns."""
        route = self._table.route
        return None if route.has_whole_rows else route.columns(self._bands)

    @cached_property
    def _pieces(self) -> MatrixPieces:
        """The parts of whole rows on each member."""
        shape = (self._length, self._table.width)
        if self._columns is None:
            return MatrixPieces(shape, (self._begins, self._ends))
        band, begins, ends = self._columns
        return MatrixPieces(shape, (self._begins[band], self._ends[band]), (begins, ends))

    @cached_property
    def _sizes(self) -> tuple[IntArray, IntArray]:
        """The numbers of elements that this rank requests of each member, and each member of this rank."""
        if self._columns is None:
            return self._requested * self._table.width, self._served * self._table.width
        band, begins, ends = self._columns
        widths = np.zeros(len(self._bands), dtype=np.int64)
        np.add.at(widths, band, ends - begins)
        return self._by_member(self._lengths * widths), self._row_counts @ self._table.route.part_widths

    def _by_member(self, counts: IntArray) -> IntArray:
        """Counts of the requested bands, added up for each member."""
        route = self._table.route
        total = np.zeros(route.members, dtype=np.int64)
        np.add.at(total, route.member_of[self._bands], counts)
        return total


def _by_kind(taken: torch.Tensor, sizes: IntArray) -> list[torch.Tensor]:
    """Split pieces that come member by member, one of each kind: the concatenated pieces of each kind."""
    kinds = sizes.shape[1]
    if kinds == 1:
        return [taken]
    by_kind: list[list[torch.Tensor]] = [[] for _ in range(kinds)]
    pieces = torch.split_with_sizes(taken, sizes[sizes > 0].tolist())
    for kind, piece in zip(sizes.nonzero()[1].tolist(), pieces, strict=True):
        by_kind[kind].append(piece)
    return [torch.cat(of_kind) if of_kind else taken[:0] for of_kind in by_kind]
