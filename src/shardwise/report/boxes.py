"""Layouts and traffic of many ranks, summed up to what is drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MOST_BOXES = 64  # of one layout in the page
MOST_JOINED = 16  # boxes of a layout, if neighbours can be drawn as one
MOST_RUNS = 8  # of ranks that hold one drawn box
MOST_BLOCKS = 64  # on a side of the traffic matrix

Place = tuple[int, tuple[int, ...], tuple[int, ...]]  # rank, offsets, sizes


class DrawnBox(NamedTuple):
    """A box and the ranks that hold it; or several boxes that make up one, each on some of the ranks."""

    ranks: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    boxes: int


def drawn_boxes(places: Iterable[Place]) -> list[DrawnBox]:
    """A layout as boxes to draw: copies as one, and where there are many, neighbours as one if they make up a box."""
    holders: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for rank, offsets, sizes in places:
        holders.setdefault((offsets, sizes), []).append(rank)
    boxes = [DrawnBox(tuple(ranks), *box, 1) for box, ranks in holders.items()]
    for most in (MOST_JOINED, MOST_BOXES):
        at_once = 2 ** math.ceil(math.log2(max(len(boxes) / most, 1)))
        joined = [_joined(boxes[k : k + at_once]) for k in range(0, len(boxes), at_once)]
        if all(joined):
            return [box for box in joined if box is not None]
    return boxes


def rank_ranges(ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Ranks as runs of neighbours, first and last of each: ``0, 1, 2, 6`` are ``(0, 2), (6, 6)``."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return runs


def traffic_blocks(links: Iterable[tuple[int, int, int]], world: int) -> tuple[int, list[tuple[int, int, int]]]:
    """The ranks in one block of the traffic matrix, and the bytes from block to block."""
    block = max(math.ceil(world / MOST_BLOCKS), 1)
    sums: dict[tuple[int, int], int] = {}
    for source, target, count in links:
        cell = source // block, target // block
        sums[cell] = sums.get(cell, 0) + count
    return block, [(source, target, count) for (source, target), count in sorted(sums.items())]


def _joined(boxes: Sequence[DrawnBox]) -> DrawnBox | None:
    """The box that these make up together, or None if they do not fill one."""
    offsets = tuple(min(starts) for starts in zip(*(box.offsets for box in boxes), strict=True))
    ends = (
        max(start + size for start, size in zip(starts, sizes, strict=True))
        for starts, sizes in zip(
            zip(*(box.offsets for box in boxes), strict=True),
            zip(*(box.sizes for box in boxes), strict=True),
            strict=True,
        )
    )
    sizes = tuple(end - start for start, end in zip(offsets, ends, strict=True))
    if math.prod(sizes) != sum(math.prod(box.sizes) for box in boxes):
        return None
    ranks = tuple(dict.fromkeys(rank for box in boxes for rank in box.ranks))
    return DrawnBox(ranks, offsets, sizes, len(boxes))
