"""Hypothesis strategies: grids of any kind, layouts on them, and the same spelled out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st

from shardwise.layout import Axis, Cut, Grid, Layout, Places
from shardwise.layout.listing import Listing
from shardwise.layout.placement import Placement


@st.composite
def cuts(draw: st.DrawFn, size: int, count: int) -> Cut:
    """A dim in so many intervals: in steps from anywhere, up or down, or between any edges."""
    up = draw(st.booleans())
    if draw(st.booleans()):
        inner = sorted(draw(st.lists(st.integers(0, size), min_size=count - 1, max_size=count - 1)))
        edges = np.array([0, *inner, size])
        return Cut.between(edges if up else edges[::-1])
    begin = draw(st.integers(0, count - 1))  # the interval that holds the first element
    step = draw(st.integers(max(-(-size // (count - begin)), 1), size + 1))
    start = -begin * step - draw(st.integers(0, max(min(step - 1, (count - begin) * step - size), 0)))
    return Cut.in_steps(size, count, start, step) if up else Cut.in_steps(size, count, size - start, -step)


@st.composite
def grids(draw: st.DrawFn, size: tuple[int, ...] | None = None) -> Grid:
    """Axes that cut dims or repeat boxes, in any order."""
    size = draw(st.lists(st.integers(0, 7), max_size=3).map(tuple)) if size is None else size
    axes = []
    for dim in draw(st.permutations([*range(len(size)), None, None])):
        if draw(st.booleans()):
            count = draw(st.integers(1, 4))
            cut = None if dim is None or not size[dim] else draw(cuts(size[dim], count))
            axes.append(Axis(count, dim, cut))
    return Grid.of(size, axes)


@st.composite
def layouts(draw: st.DrawFn, size: tuple[int, ...] | None = None) -> Layout:
    """A grid on ranks, each of which may have any number of boxes."""
    grid = draw(grids(size))
    ranks = draw(st.lists(st.integers(0, 5), min_size=len(grid), max_size=len(grid)))
    if draw(st.booleans()):
        ranks = list(range(len(grid)))
    return Layout.on_grid(grid, Places.of([Placement(torch.device("cpu"), rank) for rank in ranks]))


def spelled(layout: Layout) -> Layout:
    """The same layout with every box listed, which answers without a rule."""
    return replace(layout, pattern=Listing(layout.size, layout.boxes))
