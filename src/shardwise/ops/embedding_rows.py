"""Rows of a sharded table by their ids: asked of the ranks that hold them, with gradients that go back there.

Ids are in ascending order, so that those of a range of rows are one slice. Three all-to-alls bring the rows: of how
many ids, of the ids, and of what was asked for. One more takes the gradients back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from shardwise.meeting import lost
from shardwise.ops.embedding_route import Band, Span, make_route
from shardwise.process_group import group_ranks, is_fake
from shardwise.sharded_tensor import ShardedTensor
from shardwise.sharded_tensor.gradients import compared, new_anchor, wants_graph
from shardwise.transfer import make_plan
from shardwise.transfer.execute import wire_device
from shardwise.transfer.views import as_bytes, copy


class Cell(NamedTuple):
    """A local tensor that is not empty, as part of a band."""

    band: int  # which of this rank's bands
    local: int  # which of this rank's tensors
    width: int


class Table:
    """A sharded tensor with two dims, as a rank of its group sees it: who has which rows, and the wire to them."""

    def __init__(self, weight: ShardedTensor, group: ProcessGroup) -> None:
        layout = weight._layout
        self.group, self.width, self.dtype, self.outline = group, weight.shape[1], weight.dtype, layout.outline
        self.here = dist.get_rank(group)
        self.route = make_route(layout, tuple(group_ranks(group)))
        self.wire = wire_device(make_plan(layout, layout), group)
        self.bands = self.route.of(self.here)
        local = {box: k for k, box in enumerate(weight._frame.rows)}
        self.cells = [
            Cell(number, local[box], end - begin)
            for number, band in enumerate(self.bands)
            for box, (begin, end) in zip(band.boxes, band.columns, strict=True)
        ]

    def swap(self, given: torch.Tensor, out: list[int], into: list[int]) -> torch.Tensor:
        """What each member has for this rank, in exchange for what this rank has for each: so many elements."""
        itemsize = given.element_size()
        sent = as_bytes(given.to(self.wire).resolve_conj().resolve_neg().contiguous())
        taken = torch.empty(sum(into), dtype=given.dtype, device=self.wire)
        if is_fake(self.group):  # the others ask for nothing, and have nothing
            taken.zero_().split_with_sizes(into)[self.here].copy_(given.reshape(-1).split_with_sizes(out)[self.here])
            return taken
        came, went = ([count * itemsize for count in counts] for counts in (into, out))
        try:
            dist.all_to_all_single(as_bytes(taken), sent, came, went, group=self.group)
        except RuntimeError as error:
            raise lost(
                f"exchange {sent.numel():,} bytes of ids or rows of a sharded table", error, self.group
            ) from error
        return taken

    def packed(self, views: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The elements of all views, one after the other; a single one is taken as it lies."""
        if len(views) == 1:
            return views[0]
        sizes = [view.numel() for view in views]
        buffer = torch.empty(sum(sizes), dtype=dtype, device=self.wire)
        for part, view in zip(torch.split_with_sizes(buffer, sizes), views, strict=True):
            copy(part.view(view.shape), view)
        return buffer


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
        self._table, self._length, self._device = table, len(ids), ids.device
        self.stays = table.route.at_home and not everywhere
        bounds = torch.tensor(table.route.bounds, dtype=torch.int64, device=ids.device).view(-1, 2)
        slices = torch.searchsorted(ids, bounds).tolist()
        # For each band of each member, where its ids are among ours.
        self._slices: list[Span] = [
            (begin, end) if everywhere or band.is_asked_by(table.here) else (0, 0)
            for band, (begin, end) in zip(table.route.bands, slices, strict=True)
        ]
        self._numbers = self._tell_numbers()
        told = self._tell(ids[:, None] if counts is None else torch.stack([ids, counts], dim=1))
        self._rows = [message[:, 0] - band.ids[0] for message, band in zip(told, table.bands, strict=True)]
        self._counts = [None if counts is None else message[:, 1] for message in told]

    def fetch(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The rows of the ids, whole, from the local tensors of all ranks."""
        table, asked, held = self._table, *self._sizes(lambda band: band.width)
        taken = self._swap(table.packed(self._asked_for(tensors), table.dtype), held, asked)
        rows = torch.empty(self._length, table.width, dtype=table.dtype, device=self._device)
        views = self._views(rows)
        if len(views) == 1 and views[0] is rows:
            return taken.view(rows.shape).to(self._device)
        for view, part in zip(views, torch.split_with_sizes(taken, [view.numel() for view in views]), strict=True):
            copy(view, part.view(view.shape))
        return rows

    def _asked_for(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The rows that each member asks of each local tensor, one member after the other."""
        cells = self._table.cells
        values = []
        for cell in cells:
            local = tensors[cell.local]
            values.append(local.index_select(0, self._rows[cell.band].to(local.device)))
        if len(cells) == 1:
            return values
        parts = [
            torch.split_with_sizes(value, [numbers[cell.band] for numbers in self._numbers])
            for value, cell in zip(values, cells, strict=True)
        ]
        return [part[member] for member in range(self._table.route.members) for part in parts]

    def give(self, rows: torch.Tensor) -> list[Arrived]:
        """What all ranks have for each local tensor, for the rows that they asked for."""
        table, asked, held = self._table, *self._sizes(lambda band: band.width)
        taken = self._swap(table.packed(self._views(rows), table.dtype), asked, held)
        sizes = [numbers[cell.band] * cell.width for numbers in self._numbers for cell in table.cells]
        arrived = []
        for cell, values in zip(table.cells, _sorted_out(taken, sizes, len(table.cells)), strict=True):
            first, places, counts = table.bands[cell.band].ids[0], self._rows[cell.band], self._counts[cell.band]
            arrived.append(Arrived(cell.local, first, places, counts, values.view(-1, cell.width)))
        return arrived

    def _tell_numbers(self) -> list[list[int]]:
        """For each member, how many ids it has for each band of this rank."""
        table, route = self._table, self._table.route
        lengths = [end - begin for begin, end in self._slices]
        if self.stays:
            own = [length for length, band in zip(lengths, route.bands, strict=True) if band.member == table.here]
            return [own if member == table.here else [0] * len(own) for member in range(route.members)]
        shape = (route.members, len(table.bands))
        taken = table.swap(torch.tensor(lengths, dtype=torch.int64), route.numbers, [shape[1]] * route.members)
        numbers: list[list[int]] = taken.view(shape).tolist()
        return numbers

    def _tell(self, message: torch.Tensor) -> list[torch.Tensor]:
        """For each band of this rank, what all members say of its ids, a row for each."""
        table, columns = self._table, message.shape[1]
        slices = [(begin, end) for begin, end in self._slices if begin < end]
        views = [message] if _are_all(slices, self._length) else [message[begin:end] for begin, end in slices]
        taken = self._swap(table.packed(views, torch.int64), *self._sizes(lambda _: columns)).view(-1, columns)
        return _sorted_out(taken, [number for numbers in self._numbers for number in numbers], len(table.bands))

    def _swap(self, given: torch.Tensor, out: list[int], into: list[int]) -> torch.Tensor:
        if self.stays:
            return given.to(self._table.wire).reshape(-1)
        return self._table.swap(given, out, into)

    def _sizes(self, width: Callable[[Band], int]) -> tuple[list[int], list[int]]:
        """What this rank asks of each member, and what each member asks of this rank, if an id stands for so much."""
        table = self._table
        asked = [0] * table.route.members
        for band, (begin, end) in zip(table.route.bands, self._slices, strict=True):
            asked[band.member] += (end - begin) * width(band)
        widths = [width(band) for band in table.bands]
        held = [sum(number * each for number, each in zip(numbers, widths, strict=True)) for numbers in self._numbers]
        return asked, held

    def _views(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """The parts of whole rows that lie on each member, one after the other."""
        asked = [
            (band, one) for band, one in zip(self._table.route.bands, self._slices, strict=True) if one[0] < one[1]
        ]
        full = all(band.columns == ((0, self._table.width),) for band, _ in asked)
        if full and _are_all([one for _, one in asked], self._length):
            return [rows]
        return [rows[begin:end, left:right] for band, (begin, end) in asked for left, right in band.columns]


def _are_all(slices: Sequence[Span], length: int) -> bool:
    """Whether slices that follow each other are all of something so long."""
    position = 0
    for begin, end in slices:
        if begin != position:
            return False
        position = end
    return position == length


def _sorted_out(taken: torch.Tensor, sizes: list[int], kinds: int) -> list[torch.Tensor]:
    """Of pieces in turns, one of each kind from every member: all that are of each kind."""
    if kinds == 1:
        return [taken]
    pieces = torch.split_with_sizes(taken, sizes)
    return [torch.cat(pieces[kind::kinds]) for kind in range(kinds)]


# Under autograd -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Lookup:
    """Which rows are looked up, and what becomes of their gradients."""

    table: Table
    ids: torch.Tensor  # in ascending order
    counts: torch.Tensor | None = None  # how often each is used here, to divide its gradient by what all ranks count
    max_norm: float | None = None  # longer rows are shortened, in the table itself
    norm_type: float = 2.0
    padding: int | None = None  # the id that gets no gradient
    sparse: bool = False
    shared: bool = False  # each replica gets the whole gradient; else, the one that was asked
    silent: tuple[bool, ...] = ()  # which local tensors leave it to another replica all the same


class Rows(torch.autograd.Function):
    """Rows of a table, whose gradients are added up where they come from.

    The backward is a collective, so it must run on every rank. A rank without local tensors takes part through an
    anchor, as in a transfer.
    """

    @staticmethod
    def forward(ctx: Any, lookup: Lookup, *tensors: torch.Tensor) -> torch.Tensor:
        """The rows; the inputs are the local tensors, then an anchor."""
        rows, ctx.exchange = _fetched(lookup, tensors[:-1])
        ctx.lookup, ctx.kinds = lookup, [(local.shape, local.device) for local in tensors[:-1]]
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """A gradient for each local tensor, dense or sparse, and a zero for the anchor."""
        lookup, exchange = ctx.lookup, ctx.exchange
        table = lookup.table
        if lookup.shared or not exchange.stays:
            fields = {"verb": "the gradient of an embedding", "weight": table.outline, "dtype": grad.dtype}
            compared(table.group, fields)()
        if lookup.shared:
            exchange = Exchange(lookup.table, lookup.ids, lookup.counts, everywhere=True)
        layout = torch.sparse_coo if lookup.sparse else torch.strided
        grads = [torch.zeros(size, dtype=grad.dtype, layout=layout, device=device) for size, device in ctx.kinds]
        for one in exchange.give(grad):
            if not (lookup.silent and lookup.silent[one.local]):
                grads[one.local] = _summed(lookup, one, grads[one.local])
        return None, *grads, torch.zeros(())


def rows_of(weight: ShardedTensor, lookup: Lookup) -> torch.Tensor:
    """The rows that a lookup asks for, recorded by autograd if need be. Every rank of the group calls it."""
    tensors = weight._local_tensors()
    if not wants_graph(weight):
        with torch.no_grad():
            return _fetched(lookup, tensors)[0]
    anchor = weight._anchored()
    rows: torch.Tensor = Rows.apply(lookup, *tensors, new_anchor(weight.device) if anchor is None else anchor)  # type: ignore[no-untyped-call] # torch's
    return rows


def _fetched(lookup: Lookup, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Exchange]:
    exchange = Exchange(lookup.table, lookup.ids, lookup.counts)
    rows = exchange.fetch(tensors)
    if lookup.max_norm is not None:
        before = rows.clone()
        if len(rows):  # or CUDA would complain
            every = torch.arange(len(rows), device=rows.device)
            torch.embedding_renorm_(rows, every, lookup.max_norm, lookup.norm_type)
        # Only who asked for a row has it whole. Others who asked for it come to the same, and say so too.
        changed = (rows != before).any(dim=1)
        shortened = Exchange(lookup.table, lookup.ids[changed], everywhere=True)
        for one in shortened.give(rows[changed]):
            local = tensors[one.local]
            local.index_copy_(0, one.rows.to(local.device), one.values.to(local.device))
    return rows, exchange


def _summed(lookup: Lookup, arrived: Arrived, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of a local tensor, so far zero, with what has arrived for it."""
    rows, values = arrived.rows.to(grad.device), arrived.values.to(grad.device)
    if arrived.counts is not None:
        total = torch.zeros(len(grad), dtype=torch.int64, device=grad.device)
        total.index_add_(0, rows, arrived.counts.to(grad.device))
        values = values / total[rows, None]
    padding = -1 if lookup.padding is None else lookup.padding - arrived.first
    if lookup.sparse:
        counted = rows != padding
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call] # torch's; silent on 2.11
            return torch.sparse_coo_tensor(rows[None, counted], values[counted], grad.shape)
    grad.index_add_(0, rows, values)
    if 0 <= padding < len(grad):
        grad[padding] = 0
    return grad
