"""Which boxes lie side by side in a drawing: one panel for each slice of the dims not drawn and each copy of a box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardwise.layout.geometry import Boxes, IntArray
from shardwise.layout.geometry.drawing import shown_dims
from shardwise.layout.pictures.words import numbered, ranks_text

if TYPE_CHECKING:
    from shardwise.layout.layout import Layout

MOST_COPIES = 4  # that are drawn; of more, one less


@dataclass(frozen=True)
class Panel:
    """Boxes that lie side by side in the two drawn dims, where in the other dims, and which copy of them."""

    title: str
    rows: IntArray  # of the layout


@dataclass(frozen=True)
class Panels:
    """The panels of a layout, and in words what is left out."""

    down: int | None
    right: int | None
    panels: Sequence[Panel]
    rest: Sequence[str]


def panels_of(layout: Layout, most: int) -> Panels:
    """The filled boxes in panels, no more than so many: slice by slice, and of each slice copy by copy."""
    rows = layout.boxes.filled
    boxes = layout.boxes.take(rows)
    down, right = shown_dims(boxes)
    hidden = [dim for dim in range(boxes.ndim) if dim not in (down, right)]
    spans, slice_of = _distinct(np.concatenate([boxes.offsets[:, hidden], boxes.ends[:, hidden]], axis=1))
    copy_of = _copies(boxes)
    copies = int(copy_of.max()) + 1 if len(copy_of) else 0
    shown = copies if copies <= MOST_COPIES else MOST_COPIES - 1
    rest = []
    if shown < copies:
        who = ranks_text(layout.ranks[rows[copy_of >= shown]].tolist())
        rest.append(f"… and {numbered(copies - shown, 'more copy')}, on {who}")
    slices = max(most // max(shown, 1), 1)
    if slices < len(spans):
        rest.append(f"… and {numbered(len(spans) - slices, 'more slice')}")
    panels = []
    for number, span in enumerate(spans[:slices].tolist()):
        where = [
            f"dim {dim}: {begin}:{end}"
            for dim, begin, end in zip(hidden, span[: len(hidden)], span[len(hidden) :], strict=True)
            if (begin, end) != (0, layout.size[dim])
        ]
        for copy in range(shown):
            chosen = rows[(slice_of == number) & (copy_of == copy)]
            who = ranks_text(layout.ranks[chosen].tolist())
            which = [f"copy {copy + 1} of {copies}: {who}"] if copies > 1 else []
            if len(chosen):
                panels.append(Panel(", ".join(where + which), chosen))
    return Panels(down, right, panels, rest)


def _distinct(keys: IntArray) -> tuple[IntArray, IntArray]:
    """The different rows, in order, and for each row its number among them."""
    if not keys.shape[1]:
        return keys[:1], np.zeros(len(keys), dtype=np.int64)
    distinct, number = np.unique(keys, axis=0, return_inverse=True)
    return distinct, number.reshape(-1)


def _copies(boxes: Boxes) -> IntArray:
    """For each box, how many boxes before it are the same."""
    _, number = _distinct(np.concatenate([boxes.offsets, boxes.sizes], axis=1))
    order = np.argsort(number, kind="stable")
    ascending = number[order]
    first = np.searchsorted(ascending, ascending, "left")
    copies = np.empty(len(boxes), dtype=np.int64)
    copies[order] = np.arange(len(boxes)) - first
    return copies
