"""Boxes drawn with lines of text, every edge in its place. Errors, the terminal and notebooks share it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwise.layout.geometry.boxes import Boxes, IntArray

# A canvas cell knows in which directions lines leave it: up 1, down 2, left 4, right 8.
UP, DOWN, LEFT, RIGHT = 1, 2, 4, 8
LINES = " ╵╷│╴┘┐┤╶└┌├─┴┬┼"

MOST_LINES = 12  # of all parts downwards, unless there are more parts
MOST_SMALLEST = 3  # lines of the smallest part
ENOUGH = 0.02  # of the height: more lines are worth it if they are nearer to scale by this
MOST_EDGES = 64  # of one dim; with more, a drawing is no longer worth reading


def shown_dims(boxes: Boxes) -> tuple[int | None, int | None]:
    """The dims drawn downwards and rightwards: the two with the most edges, in tensor order."""
    if boxes.ndim == 0:
        return None, None
    if boxes.ndim == 1:
        return None, 0
    edges = [len(np.unique(np.concatenate([boxes.offsets[:, d], boxes.ends[:, d]]))) for d in range(boxes.ndim)]
    most = sorted(range(boxes.ndim), key=lambda dim: (-edges[dim], dim))[:2]
    return min(most), max(most)


def draw_boxes(boxes: Boxes, labels: Sequence[str], *, width: int = 76) -> list[str]:
    """The boxes as text, one label in each, seen in the two dims that are cut most; empty boxes are not drawn.

    Gives no lines at all when there are too many edges to be read.
    """
    rows = boxes.filled
    boxes, labels = boxes.take(rows), [labels[row] for row in rows]
    if not len(boxes):
        return []
    down, right = shown_dims(boxes)
    across, downwards = _edges(boxes, right), _edges(boxes, down)
    if len(across) > MOST_EDGES or len(downwards) > MOST_EDGES:
        return []
    canvas = _Canvas(_columns(boxes, labels, right, across, width), _rows(downwards))
    for row, label in enumerate(labels):
        left_edge, right_edge = _span(boxes, row, right, across)
        top, bottom = _span(boxes, row, down, downwards)
        canvas.box(top, bottom, left_edge, right_edge, label)
    return canvas.lines()


def _edges(boxes: Boxes, dim: int | None) -> IntArray:
    if dim is None:
        return np.array([0, 1], dtype=np.int64)
    return np.unique(np.concatenate([boxes.offsets[:, dim], boxes.ends[:, dim]]))


def _span(boxes: Boxes, row: int, dim: int | None, edges: IntArray) -> tuple[int, int]:
    """Which edges a box lies between."""
    if dim is None:
        return 0, 1
    ends = int(boxes.offsets[row, dim]), int(boxes.ends[row, dim])
    first, last = np.searchsorted(edges, ends)
    return int(first), int(last)


def _columns(boxes: Boxes, labels: Sequence[str], dim: int | None, edges: IntArray, width: int) -> list[int]:
    """The canvas column of each edge: in proportion, but with room for every label."""
    room = np.maximum((np.diff(edges) / (edges[-1] - edges[0]) * (width - len(edges))).astype(int), 1)
    for row, label in enumerate(labels):
        first, last = _span(boxes, row, dim, edges)
        missing = len(label) + 2 - (int(room[first:last].sum()) + last - first - 1)
        if missing > 0:
            room[first] += missing
    return [0, *np.cumsum(room + 1).tolist()]


def _rows(edges: IntArray) -> list[int]:
    """The canvas row of each edge: in proportion as far as lines allow, with one line at least for every part."""
    lengths = np.diff(edges).astype(float)
    found, least_error = np.ones(len(lengths), dtype=np.int64), np.inf
    for smallest in range(1, MOST_SMALLEST + 1):  # lines of the smallest part
        scale = min(smallest / lengths.min(), max(MOST_LINES, len(lengths)) / lengths.sum())
        lines = np.maximum(np.rint(lengths * scale), 1)
        error = float(np.abs(lines / lines.sum() - lengths / lengths.sum()).max())
        if error < least_error - ENOUGH:
            found, least_error = lines.astype(np.int64), error
    return [0, *np.cumsum(found + 1).tolist()]


class _Canvas:
    """Lines and letters on a grid of characters."""

    def __init__(self, columns: list[int], rows: list[int]) -> None:
        self.columns, self.rows = columns, rows
        self.strokes = [[0] * (columns[-1] + 1) for _ in range(rows[-1] + 1)]
        self.letters: dict[tuple[int, int], str] = {}

    def box(self, top: int, bottom: int, left: int, right: int, label: str) -> None:
        """Draw the box between these edges and put its label in the middle."""
        y0, y1, x0, x1 = self.rows[top], self.rows[bottom], self.columns[left], self.columns[right]
        for y in (y0, y1):
            for x in range(x0, x1):
                self.strokes[y][x] |= RIGHT
                self.strokes[y][x + 1] |= LEFT
        for x in (x0, x1):
            for y in range(y0, y1):
                self.strokes[y][x] |= DOWN
                self.strokes[y + 1][x] |= UP
        y, x = (y0 + y1) // 2, (x0 + x1 + 1 - len(label)) // 2
        for k, letter in enumerate(label):
            self.letters[y, x + k] = letter

    def lines(self) -> list[str]:
        """The drawing; a line beats a letter, so that no label hides an edge."""
        drawn = []
        for y, strokes in enumerate(self.strokes):
            characters = [LINES[s] if s else self.letters.get((y, x), " ") for x, s in enumerate(strokes)]
            drawn.append("".join(characters).rstrip())
        return drawn
