"""The boxes of a layout as drawings: one for each panel, with sizes on the edges and a tooltip for each box."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shardwise.layout.geometry import Boxes, IntArray, describe
from shardwise.layout.pictures.colours import colour, ink_on
from shardwise.layout.pictures.panels import Panel, Panels, panels_of
from shardwise.layout.pictures.scale import Scale, scale_of
from shardwise.layout.pictures.svg import Canvas, text_width
from shardwise.layout.pictures.words import SizeUnit, lengths_text, numbered, ranks_text, size_text

if TYPE_CHECKING:
    from shardwise.layout.layout import Layout

MOST_BOXES = 2048  # in one drawing
MOST_PANELS = 12
WIDEST = 280.0  # pixels of the only panel
TALLEST = 380.0
SEVERAL = 128.0  # across, of each of several
LEAST = 19.0  # pixels of a part, so that a label has room
MOST_EMPTY = 24  # drawn one by one


@dataclass(frozen=True)
class Details:
    """What boxes are drawn with."""

    unit: SizeUnit
    here: Collection[int] = ()  # rows of the layout that this rank holds
    caption: str = ""  # before the title of each panel
    width: float = WIDEST  # of the only panel
    height: float = TALLEST  # that it may grow to


def layout_drawings(layout: Layout, details: Details) -> list[Canvas]:
    """A drawing for each panel, and one for empty shards."""
    found = panels_of(layout, MOST_PANELS)
    boxes = layout.boxes.take(layout.boxes.filled)
    drawings = []
    if len(boxes):
        alone = len(found.panels) == 1
        width = details.width if alone else min(details.width, SEVERAL)
        broad = max(LEAST, text_width(str(int(layout.ranks.max())), 10) + 5)
        across = scale_of(boxes, found.right, width if found.right is not None else 90.0, broad)
        down = scale_of(boxes, found.down, _height(layout, found, width), LEAST, details.height if alone else 0.0)
        draw = _Drawer(layout, details, found, across, down)
        drawings = [draw.panel(panel) for panel in found.panels]
    if found.rest:
        drawings.append(_remark(found.rest))
    empty = np.setdiff1d(np.arange(len(layout)), layout.boxes.filled)
    return [*drawings, _empty_shards(layout, empty, details)] if len(empty) else drawings


def _height(layout: Layout, found: Panels, width: float) -> float:
    """The height in proportion to the width, within limits."""
    if found.down is None or found.right is None:
        return 52.0
    ratio = layout.size[found.down] / max(layout.size[found.right], 1)
    return width * min(max(ratio, 0.32), 0.85)


class _Drawer:
    """Draws panels of one layout, all with the same scales."""

    def __init__(self, layout: Layout, details: Details, found: Panels, across: Scale, down: Scale) -> None:
        self.layout, self.details, self.found, self.across, self.down = layout, details, found, across, down

    def panel(self, panel: Panel) -> Canvas:
        """One panel: title, sizes above and on the left, boxes."""
        boxes, canvas = self.layout.boxes.take(panel.rows), Canvas()
        top = 2.0
        title = " · ".join(filter(None, (self.details.caption, panel.title)))
        if title:
            canvas.text(1, 13, title, size=11, css="bold")
            top += 18
        labels = {side: self._edge_labels(boxes, side) for side in ("top", "left")}
        left = 2.0 + max((text_width(text, 10) + 9 for _, _, text in labels["left"]), default=0.0)
        if labels["top"]:
            top += 16
        self._sizes_above(canvas, labels["top"], left, top)
        self._sizes_beside(canvas, labels["left"], left, top)
        across, down = self.found.right, self.found.down
        shown = np.ones(len(boxes), dtype=bool)
        for scale, dim in ((self.across, across), (self.down, down)):
            if dim is not None:
                shown &= scale.shows(boxes.offsets[:, dim])
        if int(shown.sum()) > MOST_BOXES:
            shown &= _largest(boxes, MOST_BOXES)
        rows, here = np.flatnonzero(shown).tolist(), self.details.here
        for row in sorted(rows, key=lambda row: int(panel.rows[row]) in here):  # outlines lie on top
            x, width = _span(self.across, boxes, across, row)
            y, height = _span(self.down, boxes, down, row)
            self._box(canvas, int(panel.rows[row]), (left + x, top + y, width, height))
        self._left_out(canvas, boxes, panel, left, top)
        if not shown.all() and self.across.left_out is None and self.down.left_out is None:
            canvas.text(left, canvas.bottom + 14, f"and {numbered(int((~shown).sum()), 'smaller box')}", css="soft")
        return canvas

    # Boxes ------------------------------------------------------------------------------------------------------------

    def _box(self, canvas: Canvas, row: int, frame: tuple[float, float, float, float]) -> None:
        layout, (x, y, width, height) = self.layout, frame
        rank, sizes = int(layout.ranks[row]), layout.boxes.sizes[row]
        paint = colour(rank)
        gap = 0.75 if min(width, height) > 4 else 0.0  # the page shows between boxes
        with canvas.mark(_tooltip(layout, row, self.details.unit), "shard"):
            look = "here" if row in self.details.here else ""
            canvas.rect(x + gap, y + gap, width - 2 * gap, height - 2 * gap, fill=paint, css=look)
            ink, middle = ink_on(paint), x + width / 2
            name = f"rank {rank}" if rank >= 0 else str(layout.place(row))
            extent = size_text(sizes.tolist(), "×")
            if height >= 32 and _fits(name, width, 12) and _fits(extent, width, 10) and layout.size:
                canvas.text(middle, y + height / 2 - 2, name, css="bold", anchor="middle", fill=ink)
                canvas.text(middle, y + height / 2 + 11, extent, size=10, anchor="middle", fill=ink)
                return
            for label, size in ((name, 12), (name, 10), (str(rank), 11), (str(rank), 9)):
                if (rank >= 0 or label == name) and height >= size + 2 and _fits(label, width, size):
                    canvas.text(middle, y + height / 2 + size * 0.36, label, size=size, anchor="middle", fill=ink)
                    return

    def _left_out(self, canvas: Canvas, boxes: Boxes, panel: Panel, left: float, top: float) -> None:
        """Draw a band in place of the boxes that are left out, with their number and ranks."""
        for scale, dim, is_down in ((self.down, self.found.down, True), (self.across, self.found.right, False)):
            if scale.band is None or dim is None:
                continue
            begin, end = scale.band
            hidden = ~scale.shows(boxes.offsets[:, dim])
            who = ranks_text(self.layout.ranks[panel.rows[hidden]].tolist())
            lengths = _parts(boxes.offsets[hidden, dim], boxes.ends[hidden, dim])
            tooltip = f"{numbered(int(hidden.sum()), 'box')} of {who}: {lengths_text(lengths)} along dim {dim}"
            with canvas.mark(tooltip, "rest"):
                if is_down:
                    canvas.rect(
                        left + 0.75, top + begin + 0.75, self.across.length - 1.5, end - begin - 1.5, css="shade"
                    )
                    short = f"⋮ {who}"
                    if not _fits(short, self.across.length, 11):
                        short = f"⋮ {len(lengths)} more"
                    canvas.text(
                        left + self.across.length / 2, top + (begin + end) / 2 + 4, short, size=11, anchor="middle"
                    )
                else:
                    canvas.rect(left + begin + 0.75, top + 0.75, end - begin - 1.5, self.down.length - 1.5, css="shade")
                    middle = left + (begin + end) / 2
                    canvas.text(middle, top + self.down.length / 2 + 2, "…", size=13, anchor="middle")
                    canvas.text(middle, top + self.down.length / 2 + 16, f"{len(lengths)}", size=10, anchor="middle")

    # Sizes on the edges -----------------------------------------------------------------------------------------------

    def _edge_labels(self, boxes: Boxes, side: str) -> list[tuple[float, float, str]]:
        """Position, length and label of each part of this edge: the boxes that touch the edge."""
        dim, other, scale = self.found.right, self.found.down, self.across
        if side == "left":
            dim, other, scale = self.found.down, self.found.right, self.down
        if dim is None:
            return []
        touching = np.ones(len(boxes), dtype=bool)
        if other is not None and len(boxes):
            touching = boxes.offsets[:, other] == boxes.offsets[:, other].min()
        touching &= scale.shows(boxes.offsets[:, dim])
        spans = np.unique(np.stack([boxes.offsets[touching, dim], boxes.ends[touching, dim]]), axis=1)
        found = []
        for begin, end in spans.T.tolist():
            at, length = scale.span(begin, end)
            found.append((at, length, str(end - begin)))
        if scale.left_out is not None:
            first, last = scale.left_out
            at, length = scale.span(int(scale.edges[first]), int(scale.edges[last]))
            found.append((at, length, "…"))
        return sorted(found)

    @staticmethod
    def _sizes_above(canvas: Canvas, labels: list[tuple[float, float, str]], left: float, top: float) -> None:
        for at, length, text in labels:
            begin, end = left + at + 1, left + at + length - 1
            canvas.line((begin, top - 2), (begin, top - 5), (end, top - 5), (end, top - 2))
            if _fits(text, length + 4, 10):
                canvas.text((begin + end) / 2, top - 8, text, size=10, css="soft", anchor="middle")

    @staticmethod
    def _sizes_beside(canvas: Canvas, labels: list[tuple[float, float, str]], left: float, top: float) -> None:
        for at, length, text in labels:
            begin, end = top + at + 1, top + at + length - 1
            canvas.line((left - 2, begin), (left - 5, begin), (left - 5, end), (left - 2, end))
            if length >= 9:
                canvas.text(left - 8, (begin + end) / 2 + 3.5, text, size=10, css="soft", anchor="end")


def thumbnail(canvas: Canvas, layout: Layout, frame: tuple[float, float, float, float]) -> None:
    """The first panel of a layout, so small that it has only colours."""
    left, top, width, height = frame
    boxes, found = layout.boxes.take(layout.boxes.filled), panels_of(layout, 1)
    across, down = (scale_of(boxes, dim, length, 1.0) for dim, length in ((found.right, width), (found.down, height)))
    for panel in found.panels[:1]:
        for row in panel.rows[:MOST_BOXES].tolist():
            pairs = ((across, found.right), (down, found.down))
            (x, broad), (y, high) = (_span(scale, layout.boxes, dim, row) for scale, dim in pairs)
            if broad > 0 and high > 0:
                canvas.rect(left + x, top + y, broad - 0.5, high - 0.5, fill=colour(int(layout.ranks[row])), radius=1)


def _span(scale: Scale, boxes: Boxes, dim: int | None, row: int) -> tuple[float, float]:
    if dim is None:
        return 0.0, scale.length
    return scale.span(int(boxes.offsets[row, dim]), int(boxes.ends[row, dim]))


def _fits(text: str, width: float, size: float) -> bool:
    return text_width(text, size) + 4 <= width


def _tooltip(layout: Layout, row: int, unit: SizeUnit) -> str:
    boxes, volume = layout.boxes, int(layout.boxes.volumes[row])
    share = f", {volume / layout.size.numel():.1%} of the tensor" if volume else ""
    box = describe(boxes.offsets[row], boxes.sizes[row])
    return f"{layout.place(row)} holds {box}: {size_text(boxes.sizes[row].tolist())}, {unit.phrase(volume)}{share}"


def _parts(begins: IntArray, ends: IntArray) -> list[int]:
    spans = np.unique(np.stack([begins, ends]), axis=1)
    lengths: list[int] = (spans[1] - spans[0]).tolist()
    return lengths


def _largest(boxes: Boxes, most: int) -> npt.NDArray[np.bool_]:
    chosen = np.zeros(len(boxes), dtype=bool)
    chosen[np.argsort(-boxes.volumes, kind="stable")[:most]] = True
    return chosen


def _remark(lines: Sequence[str]) -> Canvas:
    canvas = Canvas()
    for number, line in enumerate(lines):
        canvas.text(1, 14 + 17 * number, line, css="soft")
    return canvas


def _empty_shards(layout: Layout, rows: IntArray, details: Details) -> Canvas:
    """Shards without elements, as dashed boxes."""
    canvas = Canvas()
    canvas.text(1, 13, numbered(len(rows), "empty shard"), css="soft")
    if len(rows) > MOST_EMPTY:
        canvas.text(1, 30, f"on {ranks_text(layout.ranks[rows].tolist())}", css="soft")
        return canvas
    for number, row in enumerate(rows.tolist()):
        x, y = 2 + 40 * (number % 8), 20 + 26 * (number // 8)
        rank = int(layout.ranks[row])
        with canvas.mark(_tooltip(layout, row, details.unit), "shard"):
            canvas.rect(x, y, 36, 22, css="empty here" if row in details.here else "empty")
            canvas.text(x + 18, y + 15, str(rank) if rank >= 0 else "?", size=11, css="soft", anchor="middle")
    return canvas
