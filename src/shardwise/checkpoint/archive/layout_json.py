"""Layouts as JSON. A layout with a rule is stored as its rule, so that an index does not grow with the square of the
number of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shardwise.errors import CheckpointError, LayoutError
from shardwise.layout import Axis, Cut, Grid, Layout, Places
from shardwise.layout.geometry import Boxes

LARGEST = 2**62


class PlacesWriter:
    """The lists of file numbers in an index. Layouts with the same places share one list."""

    def __init__(self) -> None:
        self.words: list[Any] = []
        self._known: dict[Places, int] = {}

    def number(self, places: Places) -> int:
        """The number of the list of these places."""
        if places not in self._known:
            files = places.ranks
            self._known[places] = len(self.words)
            in_order = len(files) > 1 and bool((np.diff(files) == 1).all())
            self.words.append([int(files[0]), len(files)] if in_order else {"files": files.tolist()})
        return self._known[places]


def layout_to_json(layout: Layout, places: PlacesWriter) -> dict[str, Any]:
    """A layout, whose ranks are numbers of files, as JSON."""
    on = places.number(layout.places)
    if isinstance(layout.pattern, Grid):
        return {"axes": [_axis_to_json(axis) for axis in layout.pattern.axes], "on": on}
    boxes = layout.boxes
    return {"boxes": np.concatenate([boxes.offsets, boxes.sizes], axis=1).tolist(), "on": on}


def _axis_to_json(axis: Axis) -> list[Any]:
    cut = axis.cut
    if cut is None:
        return [axis.count]
    if cut.listed:
        return [axis.count, axis.dim, cut.edges(np.arange(cut.count + 1)).tolist()]
    return [axis.count, axis.dim, cut.start, cut.step]


def places_from_json(words: Any, files: int) -> list[Places]:
    """The lists of file numbers; ``files`` is the number of files."""
    found = []
    for entry in words:
        if isinstance(entry, dict):
            ranks = np.array([_number(file) for file in entry["files"]], dtype=np.int64)
        else:
            first, count = map(_number, entry)
            if count > files:
                raise ValueError(f"{count} files where there are {files}")
            ranks = np.arange(first, first + count, dtype=np.int64)
        if len(ranks) and ranks.max() >= max(files, 1):  # boxes without elements lie in the first file, or in none
            raise ValueError(f"file {ranks.max()} of {files}")
        found.append(Places.on_ranks(ranks, "cpu"))
    return found


def layout_from_json(
    name: str, size: torch.Size, words: Any, places: Sequence[Places], *, replicas: bool = False
) -> Layout:
    """The layout of a tensor; raises where it is none, or has replicas without ``replicas``."""
    where = places[_number(words["on"])]
    try:
        if "axes" in words:
            return _by_rule(size, words["axes"], where, replicas)
        numbers = words["boxes"]
        ndim = len(size)
        boxes = Boxes.parse([row[:ndim] for row in numbers], [row[ndim:] for row in numbers], ndim)
        if not size.numel():
            return Layout.of(size, boxes, where)
        if not replicas and int(boxes.volumes.sum()) != size.numel():  # a quick check before the slow one
            raise LayoutError(f"its boxes do not have {size.numel():,} elements together, as it has")
        return Layout.checked(size, boxes, where, lambda row: f"{row} {boxes.describe(row)}", replicas=replicas)
    except LayoutError as error:
        raise CheckpointError(f"the index says of tensor '{name}' what cannot be: {error}") from error


def _by_rule(size: torch.Size, words: Any, where: Places, replicas: bool) -> Layout:
    axes = [_axis_from_json(size, entry, len(where)) for entry in words]
    dims = [axis.dim for axis in axes if axis.dim is not None]
    if len(set(dims)) < len(dims) or math.prod(axis.count for axis in axes) != len(where):
        raise LayoutError(f"axes {words!r:.200} do not make a grid of {len(where)} boxes")
    layout = Layout.by_rule(size, axes, where)
    if layout.has_replicas and size.numel() and not replicas:
        raise LayoutError("elements are stored twice")
    return layout


def _axis_from_json(size: torch.Size, words: Any, most: int) -> Axis:
    count, *cut = words
    if not 1 <= _number(count) <= most:
        raise LayoutError(f"an axis of {count!r:.50}")
    if not cut:
        return Axis(count)
    dim, *rest = cut
    length = size[_number(dim)] if _number(dim) < len(size) else 0
    if not length:
        raise LayoutError(f"an axis cuts dim {dim} of a tensor of size {tuple(size)}")
    if len(rest) == 1:
        edges = np.array([_number(edge) for edge in rest[0]], dtype=np.int64)
        steps = np.diff(edges) if len(edges) and edges[0] == 0 else -np.diff(edges)
        ends = sorted((int(edges[0]), int(edges[-1]))) if len(edges) else []
        if len(edges) != count + 1 or ends != [0, length] or (steps < 0).any():
            raise LayoutError(f"edges {rest[0]!r:.100} do not cut a dim of {length}")
        return Axis(count, dim, Cut.between(edges))
    start, step = rest
    if type(start) is not int or type(step) is not int or not 0 < abs(step) < LARGEST or abs(start) >= LARGEST:
        raise LayoutError(f"steps {rest!r:.100}")
    first, last = sorted((start, start + count * step))
    if first > 0 or last < length or abs(start) + count * abs(step) >= LARGEST:
        raise LayoutError(f"steps {rest!r:.100} do not cut a dim of {length}")
    return Axis(count, dim, Cut.in_steps(length, count, start, step))


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < LARGEST:
        raise ValueError(f"{value!r:.50} for a count")
    return value
