"""`Picture`: one thing drawn, for a notebook, a file or the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path

from shardwise.errors import PropertyError
from shardwise.layout.pictures.svg import MARGIN, STYLE, Canvas, wrap_text

WIDTH = 760  # of a file, in pixels
GAP = 24.0
EDGE = 16.0


@dataclass(frozen=True, eq=False)
class Picture:
    """Drawings below a heading. A notebook shows it, ``print`` prints it, `save` writes it to a file.

    In a notebook the drawings stand side by side as far as there is room; in a file they do so within `width` pixels.
    """

    title: str
    notes: Sequence[str]  # lines below the title
    draw: Callable[[], list[Canvas]]
    write: Callable[[int, bool], str]
    width: int = WIDTH

    @cached_property
    def drawings(self) -> list[Canvas]:
        """The drawings, each with its own coordinates."""
        return self.draw()

    def svg(self) -> str:
        """All of it as one SVG, which is readable on light and dark pages."""
        page, y = Canvas(), EDGE
        for line in wrap_text(self.title, self.width - 2 * EDGE, 15):
            page.text(EDGE, y + 14, line, size=15, css="bold")
            y += 20
        for note in self.notes:
            for line in wrap_text(note, self.width - 2 * EDGE):
                page.text(EDGE, y + 12, line, css="soft")
                y += 17
        y += 10
        x, tallest = EDGE, 0.0
        for drawing in self.drawings:
            if x > EDGE and (x + drawing.width + EDGE + MARGIN > self.width or drawing.fills_row):
                x, y, tallest = EDGE, y + tallest + GAP, 0.0
            page.put(drawing, x, y)
            x, tallest = x + drawing.width + GAP, max(tallest, drawing.height)
            if drawing.fills_row:
                x = float(self.width)
        page.right, page.bottom = page.right + EDGE, page.bottom + EDGE
        return page.alone(self.title)

    def html(self) -> str:
        """All of it as a fragment of HTML, in the colours of the page."""
        notes = "".join(f'<div style="font-size:12px;opacity:.75">{escape(note)}</div>' for note in self.notes)
        room = "max-width:100%;overflow-x:auto"
        drawings = "".join(
            f'<div style="{room}{";flex-basis:100%" * drawing.fills_row}">{drawing.inline(self.title)}</div>'
            for drawing in self.drawings
        )
        return (
            f'<div class="shardwise"><style>{STYLE}</style>'
            f'<div style="font-size:15px;font-weight:600">{escape(self.title)}</div>{notes}'
            '<div style="display:flex;flex-wrap:wrap;gap:16px 24px;align-items:flex-start;margin-top:8px">'
            f"{drawings}</div></div>"
        )

    def text(self, *, width: int = 76, colours: bool = False) -> str:
        """All of it as lines of text for the terminal, with colours if wanted."""
        return self.write(width, colours)

    def save(self, path: str | Path) -> None:
        """Write it to a file: ``.svg``, ``.html`` or ``.txt``. The rank that calls it writes; nothing travels."""
        writers: dict[str, Callable[[], str]] = {".svg": self.svg, ".html": self._page, ".txt": self.text}
        writer = writers.get(Path(path).suffix)
        if writer is None:
            raise PropertyError(f"a picture is saved as {', '.join(writers)}, found {str(path)!r}")
        Path(path).write_text(writer() + "\n", encoding="utf-8")

    def _page(self) -> str:
        return (
            '<!doctype html><html><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
            f'<meta name="color-scheme" content="light dark"><title>{escape(self.title)}</title></head>'
            f"<body>{self.html()}</body></html>"
        )

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Picture of {self.title}>"

    def _repr_html_(self) -> str:
        return self.html()

    def _repr_svg_(self) -> str:
        return self.svg()
