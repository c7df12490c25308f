"""Texts and layouts that many records share: each is written once, and a number stands for it."""

from __future__ import annotations

from typing import Any

from shardwise.report.boxes import MOST_BOXES, MOST_RUNS, Place, drawn_boxes, rank_ranges


class Strings:
    """Texts that many records share, each written once."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def place(self, text: str) -> int:
        """The number that stands for this text."""
        return self.places.setdefault(text, len(self.places))


class Layouts:
    """Layouts that many parameters share, as the boxes that are drawn of them."""

    def __init__(self) -> None:
        self.places: dict[tuple[Place, ...], int] = {}
        self.drawn: list[dict[str, Any]] = []

    def place(self, layout: tuple[Place, ...]) -> int:
        """The number that stands for this layout."""
        if layout not in self.places:
            self.places[layout] = len(self.drawn)
            boxes = drawn_boxes(layout)
            shown = [
                [rank_ranges(box.ranks)[:MOST_RUNS], len(box.ranks), box.offsets, box.sizes, box.boxes]
                for box in boxes[:MOST_BOXES]
            ]
            self.drawn.append({"boxes": shown, "left": len(boxes) - len(shown), "count": len(layout)})
        return self.places[layout]
