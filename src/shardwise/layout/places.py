"""`Places`: where each box of a layout lies. Ranks as one array, devices by the few kinds that occur."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import overload

import numpy as np
import torch

from shardwise.errors import PlacementError
from shardwise.layout.geometry import IntArray, read_only
from shardwise.layout.grid import runs
from shardwise.layout.placement import WITHOUT_INDEX, Placement, PlacementLike, RemoteDevice

PlaceKind = tuple[torch.device, str | None]  # a device, and the name of an RPC worker or None

NOWHERE = -1  # the rank of a placement that names none


class Places(Sequence[Placement]):
    """One placement for each box, in order. Frozen; compared and hashed by value."""

    def __init__(self, ranks: IntArray, kinds: Sequence[PlaceKind], kind_of: IntArray | None = None) -> None:
        self.ranks = read_only(ranks)
        self.kinds, self._kind_of = _in_order(tuple(kinds), kind_of, len(ranks))
        self._cached_rows: dict[int, tuple[int, ...]] = {}

    @staticmethod
    def of(placements: Iterable[PlacementLike | Placement | None]) -> Places:
        """The frozen form of anything that names places."""
        if isinstance(placements, Places):
            return placements
        kinds: dict[PlaceKind, int] = {}
        seen: dict[PlaceKind, int] = {}  # as given: cpu:0 is cpu
        ranks: list[int] = []
        kind_of: list[int] = []
        for placement in placements:
            if isinstance(placement, RemoteDevice):
                rank, kind = placement.rank(), (placement.device(), placement.worker_name())
            else:
                place = Placement.of(placement)
                rank, kind = place.rank, (place.device, place.worker)
            number = seen.get(kind)
            if number is None:
                known = Placement(kind[0], worker=kind[1])
                number = seen[kind] = kinds.setdefault((known.device, known.worker), len(kinds))
            ranks.append(NOWHERE if rank is None else rank)
            kind_of.append(number)
        if ranks and max(ranks) >= MOST_RANKS:
            raise PlacementError(f"no job has a rank {max(ranks)}")
        return Places(np.array(ranks, dtype=np.int64), tuple(kinds), np.array(kind_of, dtype=np.int64))

    @staticmethod
    def on_ranks(ranks: IntArray, device_type: str) -> Places:
        """A place for each of these ranks, in order: the device of this type that it uses by convention."""
        if device_type in WITHOUT_INDEX:
            return Places(ranks, [(torch.device(device_type), None)])
        count = torch.get_device_module(device_type).device_count()
        few, number = np.unique(ranks % count if count else ranks, return_inverse=True)
        return Places(ranks, [(torch.device(device_type, int(index)), None) for index in few], number.reshape(-1))

    def __len__(self) -> int:
        return len(self.ranks)

    @overload
    def __getitem__(self, row: int) -> Placement: ...
    @overload
    def __getitem__(self, row: slice) -> Places: ...
    def __getitem__(self, row: int | slice) -> Placement | Places:
        if isinstance(row, slice):
            return self.take(np.arange(len(self))[row])
        return self._place(int(self.ranks[row]), 0 if self._kind_of is None else int(self._kind_of[row]))

    def _place(self, rank: int, kind: int) -> Placement:
        device, worker = self.kinds[kind]
        return Placement(device, None if rank == NOWHERE else rank, worker)

    def __iter__(self) -> Iterator[Placement]:
        return (self[row] for row in range(len(self)))

    def take(self, rows: IntArray) -> Places:
        """The places of these boxes."""
        if len(rows) == len(self) and (rows == np.arange(len(self))).all():
            return self
        if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (np.diff(rows) == 1).all():
            run = slice(int(rows[0]), int(rows[-1]) + 1)  # shares the memory
            return Places(self.ranks[run], self.kinds, None if self._kind_of is None else self._kind_of[run])
        return Places(self.ranks[rows], self.kinds, None if self._kind_of is None else self._kind_of[rows])

    @staticmethod
    def join(parts: Sequence[Places]) -> Places:
        """The places of all parts, one after another."""
        if len(parts) == 1:
            return parts[0]
        kinds = list(dict.fromkeys(kind for part in parts for kind in part.kinds))
        numbers = [np.array([kinds.index(kind) for kind in part.kinds], dtype=np.int64)[part.kind_of] for part in parts]
        return Places(np.concatenate([part.ranks for part in parts]), kinds, np.concatenate(numbers))

    # Questions ----------------------------------------------------------------------------------------------------

    @property
    def kind_of(self) -> IntArray:
        """For each box, the number of its kind of place."""
        return np.zeros(len(self), dtype=np.int64) if self._kind_of is None else self._kind_of

    @cached_property
    def device_types(self) -> frozenset[str]:
        """The types of devices that occur."""
        return frozenset(device.type for device, _ in self.kinds)

    @cached_property
    def are_known(self) -> bool:
        """Whether every place names a rank, and none an RPC worker."""
        return bool((self.ranks >= 0).all()) and all(worker is None for _, worker in self.kinds)

    @cached_property
    def distinct(self) -> tuple[tuple[Placement, ...], IntArray]:
        """Each place once, in order of appearance, and for each box the number of its place."""
        kinds = max(len(self.kinds), 1)
        codes = (self.ranks * kinds + self.kind_of).tolist()
        numbers = {place: number for number, place in enumerate(dict.fromkeys(codes))}
        places = tuple(self._place(*divmod(place, kinds)) for place in numbers)
        return places, np.array([numbers[place] for place in codes], dtype=np.int64)

    @cached_property
    def each_once(self) -> bool:
        """Whether no rank is named twice."""
        return self._sorted is None or bool((np.diff(self._sorted[1]) > 0).all())

    @cached_property
    def different_ranks(self) -> IntArray:
        """Each rank once, ascending."""
        return self.ranks if self._sorted is None else np.unique(self.ranks)

    @cached_property
    def _sorted(self) -> tuple[IntArray, IntArray] | None:
        """Rows sorted by rank, and the sorted ranks; None if the ranks ascend one by one."""
        if len(self) and (np.diff(self.ranks) == 1).all():
            return None
        order = np.argsort(self.ranks, kind="stable")
        return order, self.ranks[order]

    def rows_on(self, rank: int) -> tuple[int, ...]:
        """The boxes on this rank, in order."""
        found = self._cached_rows.get(rank)
        if found is None:
            if len(self) <= FEW:
                rows = np.flatnonzero(self.ranks == rank)
            else:
                rows = self.rows_on_each(np.array([rank], dtype=np.int64))[1]
            found = tuple(rows.tolist())
            if len(self._cached_rows) < MOST_CACHED:
                self._cached_rows[rank] = found
        return found

    def rows_on_each(self, ranks: IntArray) -> tuple[IntArray, IntArray]:
        """For each of these ranks its boxes, in order: pairs of the number in the list, and the box."""
        if self._sorted is None:
            rows = ranks - (int(self.ranks[0]) if len(self) else 0)
            there = np.flatnonzero((rows >= 0) & (rows < len(self)))
            return there, rows[there]
        order, ascending = self._sorted
        starts, stops = np.searchsorted(ascending, ranks, "left"), np.searchsorted(ascending, ranks, "right")
        number, position = runs(starts, stops)
        return number, order[position]

    # The same on other devices --------------------------------------------------------------------------------------

    def mapped(self, place: Callable[[Placement], Placement]) -> Places:
        """Each distinct place mapped by the function."""
        distinct, number = self.distinct
        return Places.of([place(old) for old in distinct]).take(number)

    def of_type(self, device_type: str) -> Places:
        """The places on devices of this type."""
        if self.device_types == {device_type}:
            return self
        fits = np.array([device.type == device_type for device, _ in self.kinds], dtype=bool)
        return self.take(np.flatnonzero(fits[self.kind_of]))

    def on(self, device: torch.device) -> Places:
        """The same ranks, all on one device."""
        if any(worker is not None for _, worker in self.kinds):
            return self.mapped(lambda place: place.on(device))
        return Places(self.ranks, [(Placement(device).device, None)])

    def for_ranks(self, ranks: IntArray) -> Places:
        """A place on each of these ranks: the first one on that rank here, else the one that it uses by convention."""
        if np.array_equal(self.ranks, ranks):
            return self
        usual = Places.on_ranks(ranks, self.kinds[0][0].type)
        number, rows = self.rows_on_each(ranks)
        number, first = np.unique(number, return_index=True)
        kinds = list(dict.fromkeys([*self.kinds, *usual.kinds]))
        kind_of = np.array([kinds.index(kind) for kind in usual.kinds], dtype=np.int64)[usual.kind_of]
        kind_of[number] = self.kind_of[rows[first]]
        return Places(ranks, kinds, kind_of)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that differ, for all practical purposes, when the places differ."""
        hasher = hashlib.blake2b(digest_size=16)
        hasher.update(repr([(str(device), worker) for device, worker in self.kinds]).encode())
        hasher.update(self.ranks.tobytes())
        if self._kind_of is not None:
            hasher.update(self._kind_of.tobytes())
        return hasher.digest()

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Places) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        shown = ", ".join(str(self[row]) for row in range(min(len(self), 4)))
        return f"Places({shown}{', …' if len(self) > 4 else ''})"


MOST_RANKS = 2**31
FEW = 256  # places that are searched one by one, not sorted
MOST_CACHED = 64  # ranks whose rows are cached; nearly always only this rank


def _in_order(
    kinds: tuple[PlaceKind, ...], kind_of: IntArray | None, count: int
) -> tuple[tuple[PlaceKind, ...], IntArray | None]:
    """The kinds that occur, in order of appearance; no numbers where there is only one."""
    if kind_of is None or len(kinds) <= 1:
        return kinds if count else (), None
    numbers, first = np.unique(kind_of, return_index=True)
    order = np.argsort(first)
    found = tuple(kinds[int(number)] for number in numbers[order])
    if len(found) == 1:
        return found, None
    renamed = np.zeros(len(kinds), dtype=np.int64)
    renamed[numbers[order]] = np.arange(len(found))
    return found, read_only(renamed[kind_of])
