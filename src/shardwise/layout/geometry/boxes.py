"""`Boxes`: n axis-aligned boxes in d dims, held as two int64 arrays."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

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
        try:
            if len(offsets) != len(sizes):
                raise LayoutError(f"{len(offsets)} rows of offsets but {len(sizes)} rows of sizes")
            for name, rows in (("offsets", offsets), ("sizes", sizes)):
                if not set(map(len, rows)) <= {ndim}:
                    raise LayoutError(f"shard {name} should be rows of {ndim} integers")
            # An array of this kind takes whatever is an integer, and refuses what numpy would round or wrap around.
            numbers = array("q", list(chain.from_iterable(chain(offsets, sizes))))
        except (TypeError, OverflowError) as error:
            raise LayoutError(f"{_culprit(offsets, sizes)} should be rows of 64-bit integers: {error}") from error
        both = np.asarray(numbers, dtype=np.int64).reshape(2, len(offsets), ndim)
        if both.size and int(both.min()) < 0:
            which, row, _ = np.argwhere(both < 0)[0].tolist()
            name = ("offsets", "sizes")[which]
            raise LayoutError(f"shard_{name} should be >= 0, found {both[which, row].min()} in shard {row}")
        if both.size and int(both.max()) > LARGEST // 2 and (both[0] > LARGEST - both[1]).any():
            raise LayoutError("a shard ends beyond the largest 64-bit index")
        return Boxes(both[0], both[1])

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
        if self.offsets.shape != other.offsets.shape:
            return False
        mine, theirs = (self.offsets, self.sizes), (other.offsets, other.sizes)
        return all(a.tobytes() == b.tobytes() for a, b in zip(mine, theirs, strict=True))

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
        positive = self.sizes > 0
        return np.arange(len(self)) if positive.all() else np.flatnonzero(positive.all(axis=1))

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


def _culprit(offsets: object, sizes: object) -> str:
    """The first row that is no row of 64-bit integers, in words."""
    if not isinstance(offsets, Sequence) or not isinstance(sizes, Sequence):
        return "shard offsets and sizes"
    for row, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        for name, numbers in (("offsets", offset), ("sizes", size)):
            try:
                array("q", list(numbers))
            except (TypeError, OverflowError):
                return f"shard {name} ({numbers!r:.80} of shard {row})"
    return "shard offsets and sizes"
