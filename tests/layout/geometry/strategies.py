"""Random boxes for the pure tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from shardwise.layout.geometry import Boxes


@st.composite
def some_boxes(draw: st.DrawFn, ndim: int, most: int = 12, extent: int = 6) -> Boxes:
    """Any boxes, overlapping or not, some of them empty."""
    count = draw(st.integers(1, most))
    numbers = st.integers(0, extent)
    rows = st.lists(st.lists(numbers, min_size=ndim, max_size=ndim), min_size=count, max_size=count)
    return Boxes.parse(draw(rows), draw(rows), ndim)


@st.composite
def partitions(draw: st.DrawFn, ndim: int, cuts: int = 12) -> tuple[Boxes, tuple[int, ...]]:
    """Boxes that make up a tensor exactly: its box is cut in two, again and again."""
    size = tuple(draw(st.lists(st.integers(0, 9), min_size=ndim, max_size=ndim)))
    pieces = [(np.zeros(ndim, dtype=np.int64), np.array(size, dtype=np.int64))]
    for _ in range(draw(st.integers(0, cuts)) if ndim else 0):
        low, high = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        dim = draw(st.integers(0, ndim - 1))
        at = draw(st.integers(int(low[dim]), int(high[dim])))
        below, above = high.copy(), low.copy()
        below[dim] = above[dim] = at
        pieces += [(low, below), (above, high)]
    offsets = np.array([low for low, _ in pieces]).reshape(len(pieces), ndim)
    ends = np.array([high for _, high in pieces]).reshape(len(pieces), ndim)
    return Boxes(offsets, ends - offsets), size
