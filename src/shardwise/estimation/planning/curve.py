"""`Curve`: what something costs on a rank, by how many samples the rank has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True)
class Line:
    """A part of its own, and a part for each sample."""

    fixed: float
    each: float

    def of(self, samples: float) -> float:
        """For so many samples."""
        return self.fixed + self.each * samples


@dataclass(frozen=True)
class Curve:
    """The largest of some lines: a rank waits for transfers while it has few samples, and computes if it has many."""

    lines: tuple[Line, ...]

    @staticmethod
    def through(counts: Sequence[int], values: Sequence[float]) -> Curve:
        """The convex curve from point to point, below the points that it leaves out; by ascending numbers of samples.

        No line falls: more samples never cost less. Lines meet at these numbers.
        """
        hull: list[tuple[int, float]] = []
        for point in zip(counts, accumulate(values, max), strict=True):
            while len(hull) > 1 and _slope(hull[-2], point) <= _slope(hull[-2], hull[-1]):
                hull.pop()
            hull.append(point)
        slopes = [_slope(one, other) for one, other in pairwise(hull)]
        lines = [Line(value - slope * count, slope) for (count, value), slope in zip(hull, slopes, strict=False)]
        return Curve(tuple(lines) or (Line(values[0], 0.0),))

    def of(self, samples: float) -> float:
        """For so many samples."""
        return max(line.of(samples) for line in self.lines)

    def samples_within(self, cost: float) -> float:
        """How many samples cost no more."""
        if any(line.fixed > cost for line in self.lines):
            return 0.0
        return min(((cost - line.fixed) / line.each for line in self.lines if line.each), default=float("inf"))


def _slope(one: tuple[int, float], other: tuple[int, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])
