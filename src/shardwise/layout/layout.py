"""`Layout`: the frozen truth inside the library. Which boxes of a tensor of one size lie where.

A spec is a rule that makes layouts; the metadata records are a layout as others see it. Tensors with the same
sharding share one layout object, and every result of an op reuses its input's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from shardwise.errors import LayoutError
from shardwise.geometry import Boxes, IntArray, read_only
from shardwise.layout.checks import require_cover, require_disjoint, require_inside
from shardwise.layout.records import parse_shards, parse_size, shard_names
from shardwise.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.placement import Placement, PlacementLike, RemoteDevice


@dataclass(frozen=True, eq=False)
class Layout:
    """Boxes on ranks for one size. Two layouts are equal when all their boxes and places are, in order."""

    size: torch.Size
    boxes: Boxes
    places: tuple[Placement, ...]  # each distinct place once
    place_of: IntArray  # for each box, the index of its place
    said_offsets: IntArray | None = None  # those of the records, where they say that an empty box lies beyond the end

    @staticmethod
    def of(size: torch.Size, boxes: Boxes, placements: Sequence[PlacementLike | Placement | None]) -> Layout:
        """A layout of boxes that are known to make up the tensor."""
        numbers: dict[Placement, int] = {}
        seen: dict[Any, int] = {}  # few places are given many times: each is parsed once
        place_of = np.empty(len(placements), dtype=np.int64)
        for k, placement in enumerate(placements):
            said: Any = placement
            if isinstance(placement, RemoteDevice):
                said = (placement.rank(), placement.worker_name(), placement.device())
            number = seen.get(said)
            if number is None:
                number = seen[said] = numbers.setdefault(Placement.of(placement), len(numbers))
            place_of[k] = number
        # The old system's records let empty chunks begin beyond the end; in here, no box does.
        inside = np.minimum(boxes.offsets, np.array(size, dtype=np.int64))
        said = None if (inside == boxes.offsets).all() else read_only(boxes.offsets)
        frozen = Boxes(read_only(boxes.offsets if said is None else inside), read_only(boxes.sizes))
        return Layout(size, frozen, tuple(numbers), read_only(place_of), said)

    @staticmethod
    def from_metadata(shards: Sequence[ShardMetadata], size: Sequence[int]) -> Layout:
        """The layout that these records describe, or the error that says why they describe none."""
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
        require_inside(boxes, size, name)
        distinct = boxes
        if replicas:
            both = np.concatenate([boxes.offsets, boxes.sizes], axis=1)
            distinct = boxes.take(np.sort(np.unique(both, axis=0, return_index=True)[1]))
        require_disjoint(distinct, name)
        require_cover(distinct, size)
        return Layout.of(size, boxes, placements)

    def __len__(self) -> int:
        return len(self.boxes)

    @property
    def ndim(self) -> int:
        """Number of dims of the tensor."""
        return len(self.size)

    @cached_property
    def ranks(self) -> IntArray:
        """The global rank of each box; -1 where the placement names none."""
        ranks = np.array([-1 if place.rank is None else place.rank for place in self.places], dtype=np.int64)
        return read_only(ranks[self.place_of]) if len(self.places) else read_only(ranks)

    @cached_property
    def _rows_by_rank(self) -> dict[int, tuple[int, ...]]:
        rows: dict[int, list[int]] = {}
        for row, rank in enumerate(self.ranks.tolist()):
            rows.setdefault(rank, []).append(row)
        return {rank: tuple(found) for rank, found in rows.items()}

    @cached_property
    def primary(self) -> IntArray:
        """The first row of each distinct box: every element once, where there are replicas."""
        both = np.concatenate([self.boxes.offsets, self.boxes.sizes], axis=1)
        return read_only(np.sort(np.unique(both, axis=0, return_index=True)[1])) if len(both) else np.arange(0)

    @cached_property
    def has_replicas(self) -> bool:
        """Whether any element is held more than once."""
        return int(self.boxes.volumes.sum()) > self.size.numel()

    @cached_property
    def once(self) -> Layout:
        """The same boxes, each on the first of its places only."""
        rows = self.primary
        return Layout.of(self.size, self.boxes.take(rows), [self.place(int(row)) for row in rows])

    def rows_on(self, rank: int) -> tuple[int, ...]:
        """The boxes that this rank holds, in order."""
        return self._rows_by_rank.get(rank, ())

    def place(self, row: int) -> Placement:
        """Where this box lies."""
        return self.places[int(self.place_of[row])]

    def cuts(self, dim: int) -> bool:
        """Whether a box that holds anything has only a part of this dim."""
        rows = self.boxes.filled
        return bool((self.boxes.sizes[rows, dim] < self.size[dim]).any())

    def elements_by_rank(self) -> dict[int, int]:
        """How many elements each rank holds, for the ranks that hold a box."""
        volumes = self.boxes.volumes
        return {rank: int(volumes[list(rows)].sum()) for rank, rows in sorted(self._rows_by_rank.items())}

    @property
    def offsets_to_say(self) -> IntArray:
        """The offsets that records give."""
        return self.boxes.offsets if self.said_offsets is None else self.said_offsets

    @cached_property
    def in_rank_order(self) -> Layout:
        """The same boxes on the same places, listed by their ranks; those of one rank in the order that they have.

        As in the old system's records after a reshard, an empty box begins where the tensor ends.
        """
        order = np.argsort(self.ranks, kind="stable")
        return Layout.of(self.size, self.boxes.take(order), [self.place(int(row)) for row in order])

    def moved(self, place: Callable[[Placement], Placement]) -> Layout:
        """The same boxes, each place replaced by the function's answer."""
        places = [place(old) for old in self.places]
        distinct = list(dict.fromkeys(places))
        numbers = np.array([distinct.index(new) for new in places], dtype=np.int64)
        return replace(self, places=tuple(distinct), place_of=read_only(numbers[self.place_of]))

    def shard_metadata(self, row: int) -> ShardMetadata:
        """A new record of one box."""
        offsets, sizes = self.offsets_to_say[row].tolist(), self.boxes.sizes[row].tolist()
        return ShardMetadata.trusted(offsets, sizes, self.place(row).remote_device())

    def metadata(self, properties: TensorProperties) -> ShardedTensorMetadata:
        """New records of the whole tensor."""
        devices = [place.remote_device() for place in self.places]
        rows = zip(self.offsets_to_say.tolist(), self.boxes.sizes.tolist(), self.place_of.tolist(), strict=True)
        shards = [ShardMetadata.trusted(offsets, sizes, devices[place]) for offsets, sizes, place in rows]
        return ShardedTensorMetadata(shards, self.size, properties)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that differ, for all practical purposes, when the layouts differ."""
        hasher = hashlib.blake2b(digest_size=16)
        hasher.update(repr((tuple(self.size), [(str(place), place.rank) for place in self.places])).encode())
        for array in (self.boxes.offsets, self.boxes.sizes, self.place_of):
            hasher.update(np.ascontiguousarray(array).tobytes())
        return hasher.digest()

    @cached_property
    def outline(self) -> str:
        """The first boxes and the digest in one line, for errors that compare layouts."""
        shown = [f"{self.boxes.describe(row)} on {self.place(row)}" for row in range(min(len(self), 4))]
        more = f" and {len(self) - 4} more" if len(self) > 4 else ""
        return f"({', '.join(shown)}{more}) #{self.digest.hex()[:12]}"

    def order_of(self, other: Layout) -> list[int] | None:
        """For each box, the row of the same box on the same place in another layout; None if they differ in more
        than the order of their boxes."""
        if self.size != other.size or len(self) != len(other):
            return None
        rows: dict[tuple[Any, ...], list[int]] = {}
        for row in range(len(other)):
            rows.setdefault(other._key(row), []).append(row)
        found = [rows.get(self._key(row), []) for row in range(len(self))]
        return [same.pop(0) for same in found] if all(found) else None

    def _key(self, row: int) -> tuple[Any, ...]:
        return *self.boxes.offsets[row].tolist(), *self.boxes.sizes[row].tolist(), self.place(row)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        ranks = sorted(rank for rank in self._rows_by_rank if rank >= 0)
        return f"Layout({tuple(self.size)} in {len(self)} boxes on ranks {ranks})"
