"""Boxes of integers, without processes or tensors.

- `boxes`: `Boxes`; `intersect`: which boxes of two sets intersect; `cover`: overlaps and gaps; `drawing`: boxes as text
"""

from shardwise.layout.geometry.boxes import Boxes, IntArray, describe, read_only
from shardwise.layout.geometry.cover import find_gap, find_overlap
from shardwise.layout.geometry.drawing import draw_boxes
from shardwise.layout.geometry.intersect import intersections, iter_intersections

__all__ = [
    "Boxes",
    "IntArray",
    "describe",
    "draw_boxes",
    "find_gap",
    "find_overlap",
    "intersections",
    "iter_intersections",
    "read_only",
]
