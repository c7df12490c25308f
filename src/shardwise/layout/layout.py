"""`Layout`: which boxes of a tensor of one size lie on which ranks. Frozen.

A spec is a rule that makes layouts; the metadata records are a layout as others see it. Tensors with the same
sharding share one layout object, and every result of an op reuses its input's.

Boxes that follow a rule are a `Grid`, all others a `Listing`; both have the same methods. A question about a few boxes
costs as much in a world of thousands of ranks as on one machine; `boxes` lists all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from shardwise.errors import LayoutError
from shardwise.layout.checks import (
    parse_shards,
    parse_size,
    require_cover,
    require_disjoint,
    require_within_size,
    shard_names,
)
from shardwise.layout.geometry import Boxes, IntArray, read_only
from shardwise.layout.grid import Axis, Grid, Pairs, grid_from_boxes
from shardwise.layout.listing import Listing
from shardwise.layout.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.layout.pictures import Picture, layout_picture
from shardwise.layout.placement import Placement, PlacementLike
from shardwise.layout.places import MOST_CACHED, Places

Where = Iterable[PlacementLike | Placement | None] | Places


FEW_RECORDS = 64  # whose values a layout keeps for new records


@dataclass(frozen=True, eq=False)
class Layout:
    """Boxes on ranks for one size. Two layouts are equal when all their boxes and places are, in order.

    ``tensor.sharding`` is one, and ``spec.layout(size)``. Printed, it is a picture; so it is in a notebook::

        >>> layout = shardwise.zeros(0, 5, 4).sharding
        >>> layout.size, len(layout), layout.has_replicas
        (torch.Size([5, 4]), 2, False)
        >>> layout.boxes.offsets.tolist(), layout.ranks.tolist()
        ([[0, 0], [3, 0]], [0, 1])
    """

    size: torch.Size
    pattern: Grid | Listing
    places: Places  # of each box
    # Where records have empty boxes beyond the end, as in the old system: all offsets, or dim and length of the chunks.
    record_offsets: IntArray | tuple[int, int] | None = None

    @staticmethod
    def of(size: Sequence[int], boxes: Boxes, placements: Where) -> Layout:
        """A layout of boxes that are known to make up the tensor."""
        # In records of the old system empty chunks begin beyond the end; in a layout no box does.
        limit, record_offsets = np.array(size, dtype=np.int64), None
        if (boxes.offsets > limit).any():
            record_offsets, boxes = read_only(boxes.offsets), Boxes(np.minimum(boxes.offsets, limit), boxes.sizes)
        pattern = grid_from_boxes(size, boxes) or Listing(size, boxes)
        return Layout(torch.Size(size), pattern, Places.of(placements), record_offsets)

    @staticmethod
    def by_rule(size: Sequence[int], axes: Iterable[Axis], places: Places) -> Layout:
        """The layout of a grid: one box for each place, in row-major order of the axes."""
        return Layout(torch.Size(size), Grid.of(size, axes), places)

    @staticmethod
    def on_grid(grid: Grid, places: Places) -> Layout:
        """The layout of this grid."""
        return Layout(torch.Size(grid.size), grid, places)

    @staticmethod
    def whole(size: Sequence[int], places: Where) -> Layout:
        """All of the tensor on each of these places."""
        known = Places.of(places)
        if not len(known):
            none = np.zeros((0, len(size)), dtype=np.int64)
            return Layout.of(size, Boxes(none, none), known)
        return Layout.by_rule(size, [Axis(len(known))], known)

    @staticmethod
    def from_metadata(shards: Sequence[ShardMetadata], size: Sequence[int]) -> Layout:
        """The layout of these records, or the error that says why they make up no tensor."""
        boxes, places = parse_shards(shards), [shard.placement for shard in shards]
        return Layout.checked(parse_size(size), boxes, places, shard_names(shards))

    @staticmethod
    def checked(
        size: torch.Size,
        boxes: Boxes,
        placements: Sequence[PlacementLike | Placement | None],
        name: Callable[[int], str],
        *,
        replicas: bool = False,
    ) -> Layout:
        """A layout of boxes that may or may not make up the tensor; with replicas, the same box may lie on many."""
        if len(boxes) != len(placements):
            raise LayoutError(f"{len(placements)} placements for {len(boxes)} boxes")
        require_within_size(boxes, size, name)
        distinct = boxes
        if replicas:
            both = np.concatenate([boxes.offsets, boxes.sizes], axis=1)
            distinct = boxes.take(np.sort(np.unique(both, axis=0, return_index=True)[1]))
        require_disjoint(distinct, name)
        require_cover(distinct, size)
        return Layout.of(size, boxes, placements)

    def __len__(self) -> int:
        return len(self.places)

    @property
    def ndim(self) -> int:
        """Number of dims of the tensor."""
        return len(self.size)

    # Boxes ------------------------------------------------------------------------------------------------------------

    @property
    def boxes(self) -> Boxes:
        """All boxes, as arrays: for a picture or a record, not for the hot path."""
        return self.pattern.boxes

    def at(self, rows: Sequence[int] | IntArray) -> Boxes:
        """These boxes."""
        return self.pattern.at(np.asarray(rows, dtype=np.int64))

    def extent(self, row: int) -> list[int]:
        """The size of one box."""
        found = self._extents.get(row)
        if found is None:
            found = self.at([row]).sizes[0].tolist()
            if len(self._extents) < MOST_CACHED:
                self._extents[row] = found
        return list(found)

    @cached_property
    def _extents(self) -> dict[int, list[int]]:
        return {}

    def index(self, row: int) -> tuple[slice, ...]:
        """One box as an index into a tensor."""
        return self.at([row]).index(0)

    def meeting(self, wanted: Boxes, *, once: bool = False) -> Pairs:
        """Pairs of a given box and a row that share elements, in order; of replicas all, or the first one only."""
        return self.pattern.meeting(wanted, once=once)

    def cuts(self, dim: int) -> bool:
        """Whether a box that holds anything has only a part of this dim."""
        return self.pattern.is_cut(dim)

    @property
    def volumes(self) -> tuple[int, int]:
        """Elements in the smallest box that holds any, and in the largest."""
        return self.pattern.volumes

    @property
    def has_replicas(self) -> bool:
        """Whether any element is held more than once."""
        return self.pattern.has_replicas

    @property
    def is_whole_everywhere(self) -> bool:
        """Whether every box is all of the tensor, empty or not."""
        grid = self.pattern
        return isinstance(grid, Grid) and not grid.cuts

    def is_first(self, row: int) -> bool:
        """Whether a box is the first of its replicas."""
        return int(self.pattern.first(np.array([row]))[0]) == row

    @property
    def is_partition(self) -> bool:
        """Whether each element is in one box, and there are several; False for irregular boxes."""
        if not isinstance(self.pattern, Grid) or self.has_replicas or not self.ndim or len(self) < 2:
            return False
        return self.elements == self.size.numel()

    @cached_property
    def once(self) -> Layout:
        """The same boxes, each on the first of its places only."""
        rows = self.pattern.once
        return self if len(rows) == len(self) else self.chosen(rows)

    # Places -----------------------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> IntArray:
        """The global rank of each box; -1 where the placement names none."""
        return self.places.ranks

    def rows_on(self, rank: int) -> tuple[int, ...]:
        """The boxes that this rank holds, in order."""
        return self.places.rows_on(rank)

    def place(self, row: int) -> Placement:
        """Where this box lies."""
        return self.places[int(row)]

    @property
    def some_device(self) -> torch.device:
        """The device of the first box; a layout without boxes has the CPU."""
        return self.places.kinds[0][0] if self.places.kinds else torch.device("cpu")

    @cached_property
    def elements(self) -> int:
        """Elements in all boxes, each replica counted."""
        if isinstance(self.pattern, Grid):
            return self.pattern.copies * self.size.numel()
        return int(self.boxes.volumes.sum())

    @cached_property
    def most_elements(self) -> int:
        """The elements on the rank that holds most."""
        if self.places.each_once:
            return self.volumes[1]
        return max(self.elements_by_rank().values(), default=0)

    def elements_by_rank(self) -> dict[int, int]:
        """The number of elements on each rank that holds a box."""
        ranks, number = np.unique(self.ranks, return_inverse=True)
        totals = np.zeros(len(ranks), dtype=np.int64)
        np.add.at(totals, number.reshape(-1), self.pattern.all_volumes)
        return dict(zip(ranks.tolist(), totals.tolist(), strict=True))

    @cached_property
    def in_rank_order(self) -> Layout:
        """The same boxes on the same places, sorted by rank; the boxes of one rank keep their order.

        As in records of the old system after a reshard, an empty box begins where the tensor ends.
        """
        if (np.diff(self.ranks) >= 0).all():
            return replace(self, record_offsets=None)
        return self.chosen(np.argsort(self.ranks, kind="stable"))

    def chosen(self, rows: IntArray) -> Layout:
        """These boxes on their places, in this order."""
        return Layout.of(self.size, self.pattern.at(rows), self.places.take(rows))

    def on(self, places: Places) -> Layout:
        """The same boxes on other places."""
        return replace(self, places=places)

    def moved(self, place: Callable[[Placement], Placement]) -> Layout:
        """The same boxes, each place mapped by the function."""
        return self.on(self.places.mapped(place))

    def with_dim(self, at: int, length: int) -> Layout:
        """The layout of a tensor that has one more dim, in this position, which is not cut."""
        size = [*self.size[:at], length, *self.size[at:]]
        if isinstance(self.pattern, Grid):
            grid = self.pattern.mapped(size, lambda dim, cut: (dim + (dim >= at), cut))
            return Layout.on_grid(grid, self.places)
        offsets, sizes = np.insert(self.boxes.offsets, at, 0, axis=1), np.insert(self.boxes.sizes, at, length, axis=1)
        return Layout.of(size, Boxes(offsets, sizes), self.places)

    # Records ----------------------------------------------------------------------------------------------------------

    def record_offsets_at(self, rows: Sequence[int] | IntArray) -> IntArray:
        """The offsets of these boxes in records."""
        if isinstance(self.record_offsets, np.ndarray):
            return self.record_offsets[np.asarray(rows, dtype=np.int64)]
        offsets = self.at(rows).offsets
        if self.record_offsets is not None:
            # In records of the old system an empty chunk begins at its number times the chunk size.
            dim, length = self.record_offsets
            offsets[:, dim] = np.asarray(rows, dtype=np.int64) * length
        return offsets

    @property
    def all_record_offsets(self) -> IntArray:
        """The offsets of all boxes in records."""
        return self.boxes.offsets if self.record_offsets is None else self.record_offsets_at(np.arange(len(self)))

    def shard_metadata(self, row: int) -> ShardMetadata:
        """A new record of one box."""
        return ShardMetadata.trusted(
            self.record_offsets_at([row])[0].tolist(), self.extent(row), self.place(row).remote_device()
        )

    def metadata(self, properties: TensorProperties) -> ShardedTensorMetadata:
        """New records of the whole tensor."""
        places, place_of = self.places.distinct
        devices = [place.remote_device() for place in places]
        if len(self) <= FEW_RECORDS:
            offsets, sizes, numbers = self._record_values
            both = [one.copy() for one in offsets], [one.copy() for one in sizes]
        else:
            both, numbers = (self.all_record_offsets.tolist(), self.boxes.sizes.tolist()), place_of.tolist()
        return ShardedTensorMetadata(
            ShardMetadata.many(*both, map(devices.__getitem__, numbers)), self.size, properties
        )

    @cached_property
    def _record_values(self) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """Offsets and sizes of all records, and the number of the place of each."""
        return self.all_record_offsets.tolist(), self.boxes.sizes.tolist(), self.places.distinct[1].tolist()

    # Comparing --------------------------------------------------------------------------------------------------------

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that differ, for all practical purposes, when the layouts differ."""
        hasher = hashlib.blake2b(self.places.digest, digest_size=16)
        hasher.update(repr(tuple(self.size)).encode())
        if isinstance(self.pattern, Grid):  # a grid has one canonical form
            hasher.update(repr(self.pattern.axes).encode())
        else:
            for array in (self.boxes.offsets, self.boxes.sizes):
                hasher.update(array.tobytes())
        return hasher.digest()

    @cached_property
    def outline(self) -> str:
        """The first boxes and the digest in one line, for errors that compare layouts."""
        first = self.at(np.arange(min(len(self), 4)))
        shown = [f"{first.describe(row)} on {self.place(row)}" for row in range(len(first))]
        more = f" and {len(self) - 4} more" if len(self) > 4 else ""
        return f"({', '.join(shown)}{more}) #{self.digest.hex()[:12]}"

    def order_of(self, other: Layout) -> list[int] | None:
        """For each box, the row of the same box on the same place in another layout; None if they differ in more
        than the order of their boxes."""
        if self.size != other.size or len(self) != len(other) or self.volumes != other.volumes:
            return None
        if self == other:
            return list(range(len(self)))
        kinds = {kind: number for number, kind in enumerate(self.places.kinds)}
        if set(kinds) != set(other.places.kinds) or any(self.cuts(dim) != other.cuts(dim) for dim in range(self.ndim)):
            return None
        one, two = self._table(kinds), other._table(kinds)
        order, others = np.lexsort(one), np.lexsort(two)
        if (one[:, order] != two[:, others]).any():
            return None
        found = np.empty(len(self), dtype=np.int64)
        found[order] = others
        rows: list[int] = found.tolist()
        return rows

    def _table(self, kinds: dict[Any, int]) -> IntArray:
        """Offsets, sizes, kind of place and rank, one column for each box."""
        numbers = np.array([kinds[kind] for kind in self.places.kinds], dtype=np.int64)
        boxes = self.boxes
        return np.stack([*boxes.offsets.T, *boxes.sizes.T, numbers[self.places.kind_of], self.ranks])

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def _picture_(self, **options: Any) -> Picture:
        return layout_picture(self, **options)

    def _repr_html_(self) -> str:
        return self._picture_().html()

    def __str__(self) -> str:
        return str(self._picture_())

    def __repr__(self) -> str:
        ranks = self.places.different_ranks[self.places.different_ranks >= 0]
        shown = ranks.tolist() if len(ranks) <= MOST_SHOWN else f"{ranks[0]} … {ranks[-1]} ({len(ranks)} of them)"
        return f"Layout({tuple(self.size)} in {len(self)} boxes on ranks {shown})"


MOST_SHOWN = 16  # ranks in a text
