"""`Boxes`: n axis-aligned boxes in d dims, held as two int64 arrays."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.errors import LayoutError

IntArray = npt.NDArray[np.int64]

LARGEST = 2**63 - 1


def read_only(array: IntArray) -> IntArray:
    """The same array, which nobody can write to through this reference."""
    view = array.view()
    view.flags.writeable = False
    return view


def describe(offsets: Sequence[int] | IntArray, sizes: Sequence[int] | IntArray) -> str:
    """A box as one reads it in an index expression: ``[0:4, 2:6]``."""
    return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(offsets, sizes, strict=True)) + "]"


@dataclass(frozen=True, eq=False)
class Boxes:
    """Boxes ``[offset, offset + size)``, one row each; a box with a zero size holds nothing."""

    offsets: IntArray
    sizes: IntArray

    @staticmethod
    def parse(offsets: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]], ndim: int) -> Boxes:
        """Boxes from rows of integers, or a `LayoutError`: never negative, never beyond int64."""
        arrays = [_rows(name, rows, ndim) for name, rows in (("offsets", offsets), ("sizes", sizes))]
        if len(arrays[0]) != len(arrays[1]):
            raise LayoutError(f"{len(arrays[0])} rows of offsets but {len(arrays[1])} rows of sizes")
        if (arrays[0] > LARGEST - arrays[1]).any():
            raise LayoutError("a shard ends beyond the largest 64-bit index")
        return Boxes(*arrays)

    @staticmethod
    def whole(size: Sequence[int]) -> Boxes:
        """The one box that is a whole tensor of this size."""
        sizes = np.array([size], dtype=np.int64).reshape(1, len(size))
        return Boxes(np.zeros_like(sizes), sizes)

    def __len__(self) -> int:
        return len(self.offsets)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Boxes):
            return NotImplemented
        return np.array_equal(self.offsets, other.offsets) and np.array_equal(self.sizes, other.sizes)

    __hash__ = None  # type: ignore[assignment] # arrays have none

    @property
    def ndim(self) -> int:
        """Number of dims of every box."""
        return int(self.offsets.shape[1])

    @cached_property
    def ends(self) -> IntArray:
        """The first index behind each box, per dim."""
        return self.offsets + self.sizes

    @cached_property
    def volumes(self) -> IntArray:
        """Elements in each box; right where each fits into 63 bits, as inside any real tensor."""
        volumes: IntArray = np.prod(self.sizes, axis=1, dtype=np.int64)
        return volumes

    @cached_property
    def filled(self) -> IntArray:
        """Which boxes hold at least one element."""
        return np.flatnonzero((self.sizes > 0).all(axis=1))

    def take(self, rows: IntArray) -> Boxes:
        """The boxes of these rows."""
        return Boxes(self.offsets[rows], self.sizes[rows])

    def select(self, dims: Sequence[int]) -> Boxes:
        """The boxes seen in these dims only."""
        columns = list(dims)
        return Boxes(self.offsets[:, columns], self.sizes[:, columns])

    def index(self, row: int) -> tuple[slice, ...]:
        """One box as an index into a tensor."""
        spans = zip(self.offsets[row].tolist(), self.ends[row].tolist(), strict=True)
        return tuple(slice(begin, end) for begin, end in spans)

    def describe(self, row: int) -> str:
        """One box as one reads it in an index expression."""
        return describe(self.offsets[row], self.sizes[row])


def _rows(name: str, rows: Sequence[Sequence[int]], ndim: int) -> IntArray:
    """Rows of integers as an array, refusing what numpy would silently round or wrap around."""
    try:
        if any(length != ndim for length in set(map(len, rows))):
            raise LayoutError(f"shard {name} should be rows of {ndim} integers")
        flat: list[Any] = list(chain.from_iterable(rows))
        if not set(map(type, flat)) <= {int}:  # other kinds of integers, such as numpy's
            flat = [operator.index(value) for value in flat]
        array = np.array(flat, dtype=np.int64).reshape(len(rows), ndim)
    except (TypeError, OverflowError) as error:
        raise LayoutError(f"shard {name} should be rows of 64-bit integers: {error}") from error
    if array.size and int(array.min()) < 0:
        raise LayoutError(f"shard_{name} should be >= 0, found {int(array.min())}")
    return array
