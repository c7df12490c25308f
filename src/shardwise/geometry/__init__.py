"""Boxes of integers: parsing, intersection, overlaps, gaps and drawings. Knows nothing of processes."""

from shardwise.geometry.boxes import Boxes, IntArray, describe, read_only
from shardwise.geometry.cover import find_gap, find_overlap
from shardwise.geometry.drawing import draw
from shardwise.geometry.intersect import intersections, iter_intersections

__all__ = [
    "Boxes",
    "IntArray",
    "describe",
    "draw",
    "find_gap",
    "find_overlap",
    "intersections",
    "iter_intersections",
    "read_only",
]
