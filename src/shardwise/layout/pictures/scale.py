"""`Scale`: where in a drawing the edges of boxes lie along one dim. Thin parts get room, some of many are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.layout.geometry import Boxes, IntArray
from shardwise.layout.pictures.words import lengths_text

BAND = 34.0  # pixels in the place of those left out


@dataclass(frozen=True)
class Scale:
    """Pixels for the edges of one dim."""

    edges: IntArray
    pixels: npt.NDArray[np.float64]  # of each edge
    left_out: tuple[int, int] | None = None  # parts between edges that are not drawn, from and to

    @property
    def length(self) -> float:
        """Pixels in all."""
        return float(self.pixels[-1])

    @property
    def band(self) -> tuple[float, float] | None:
        """Pixels where parts are left out, from and to."""
        if self.left_out is None:
            return None
        begin, end = self.left_out
        return float(self.pixels[begin]), float(self.pixels[end])

    def span(self, begin: int, end: int) -> tuple[float, float]:
        """Where the part from one edge to another begins, and how long it is."""
        first, last = (float(self.pixels[int(np.searchsorted(self.edges, edge))]) for edge in (begin, end))
        return first, last - first

    def shows(self, begins: IntArray) -> npt.NDArray[np.bool_]:
        """Whether parts that begin at these edges are drawn."""
        if self.left_out is None:
            return np.ones(len(begins), dtype=bool)
        at = np.searchsorted(self.edges, begins)
        return (at < self.left_out[0]) | (at >= self.left_out[1])


def scale_of(boxes: Boxes, dim: int | None, length: float, least: float, longest: float = 0.0) -> Scale:
    """The scale of one dim for all panels of a layout.

    Parts are in proportion, but none is shorter than ``least`` pixels as far as there is room, which is made up to
    ``longest``. Where there is none, and no box lies across several parts, the first and the last parts are drawn.
    """
    if dim is None:
        return Scale(np.array([0, 1], dtype=np.int64), np.array([0.0, length]))
    edges = edges_of(boxes, dim)
    parts, left_out = np.diff(edges).astype(np.float64), None
    length = max(length, min(least * len(parts), longest))
    if len(parts) > max(int(length / least), 4):
        left_out = middle_parts(boxes, dim, max(int((length - BAND) / least), 2))
    drawn = np.ones(len(parts), dtype=bool)
    if left_out is not None:
        drawn[left_out[0] : left_out[1]] = False
        length -= BAND
    pixels = np.zeros(len(parts))
    pixels[drawn] = _proportional(parts[drawn], length, min(least, 0.8 * length / max(int(drawn.sum()), 1)))
    if left_out is not None:
        pixels[left_out[0]] = BAND  # the parts behind it have no length
    return Scale(edges, np.concatenate([[0.0], np.cumsum(pixels)]), left_out)


def edges_of(boxes: Boxes, dim: int) -> IntArray:
    """Where boxes begin or end along a dim, ascending."""
    return np.unique(np.concatenate([boxes.offsets[:, dim], boxes.ends[:, dim]]))


def middle_parts(boxes: Boxes, dim: int, few: int) -> tuple[int, int] | None:
    """The parts between the edges of a dim that are left out so that few remain; none if a box lies across several."""
    edges = edges_of(boxes, dim)
    starts, ends = (np.searchsorted(edges, side[:, dim]) for side in (boxes.offsets, boxes.ends))
    if len(edges) - 1 <= few + 1 or (ends - starts > 1).any():
        return None
    return few - few // 3, len(edges) - 1 - few // 3


def _proportional(parts: npt.NDArray[np.float64], length: float, least: float) -> npt.NDArray[np.float64]:
    """Lengths in proportion that add up to this one, none below the least."""
    thin = np.zeros(len(parts), dtype=bool)
    while True:
        rest = length - least * int(thin.sum())
        pixels = np.where(thin, least, parts * rest / max(float(parts[~thin].sum()), 1e-9))
        more = (pixels < least - 1e-9) & ~thin
        if not more.any():
            return pixels
        thin |= more


def cut_text(boxes: Boxes, dim: int, size: Sequence[int]) -> str:
    """The length of a dim, and the parts that it is cut into: ``1001 = 3 × 251 + 248``."""
    spans = np.unique(np.stack([boxes.offsets[:, dim], boxes.ends[:, dim]]), axis=1)
    lengths = (spans[1] - spans[0]).tolist()
    if len(lengths) < 2:
        return str(size[dim])
    if (spans[0][1:] != spans[1][:-1]).any():  # boxes that lie across each other's edges
        return f"{size[dim]}, {len(np.unique(spans)) - 2} cuts"
    return f"{size[dim]} = {lengths_text(lengths)}"
