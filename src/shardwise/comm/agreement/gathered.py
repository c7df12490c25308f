"""`Gathered`: what each rank of a group brings to a meeting. Few different values, on many ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

from shardwise.layout.geometry import IntArray, read_only

V = TypeVar("V")


class Gathered(list[V]):
    """One value for each rank, in group order. Ranks that brought the same have the same object: do not change it."""

    kinds: list[V]  # each value once, in the order of the first ranks that brought them
    kind_of: IntArray  # for each rank, which of them

    @staticmethod
    def by(values: Iterable[V]) -> Gathered[V]:
        """These values, which can be hashed."""
        numbers: dict[V, int] = {}
        kind_of = np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.int64)
        return Gathered._of(list(numbers), read_only(kind_of))

    @staticmethod
    def alike(value: V, count: int) -> Gathered[V]:
        """The same on so many ranks."""
        return Gathered._of([value], np.broadcast_to(np.int64(0), count))

    def changed(self, function: Callable[[V], Any]) -> Gathered[Any]:
        """With what the function makes of each value, called once for all ranks that brought it."""
        return Gathered._of([function(kind) for kind in self.kinds], self.kind_of)

    def first(self, kind: int) -> int:
        """The first rank, by its number in the group, that brought a value."""
        return int(np.argmax(self.kind_of == kind))

    @staticmethod
    def _of(kinds: list[Any], kind_of: IntArray) -> Gathered[Any]:
        many = len(kinds) > 1
        told: Gathered[Any] = Gathered(map(kinds.__getitem__, kind_of.tolist()) if many else kinds * len(kind_of))
        told.kinds, told.kind_of = kinds, kind_of
        return told
