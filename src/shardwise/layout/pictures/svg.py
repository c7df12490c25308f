"""`Canvas`: shapes and text on a drawing that grows to hold them, and how a page shows it, light or dark.

Everything but the boxes of ranks is drawn in `currentColor`. Within a page, that is the colour of the page's own text,
so that it can be read in whatever theme a notebook has. A file of its own brings paper and ink for light and for dark.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape

FONT = "system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif"
MARGIN = 2.0  # around a drawing, for outlines

# A page has one style for all that is in it: every rule is within our own class.
STYLE = (
    f".shardwise{{font-family:{FONT};font-variant-numeric:tabular-nums}}"
    ".shardwise text{fill:currentColor;pointer-events:none}"
    ".shardwise .soft{opacity:.72}"
    ".shardwise .bold{font-weight:600}"
    ".shardwise .line{stroke:currentColor;stroke-opacity:.45;fill:none}"
    ".shardwise .shade{fill:currentColor;fill-opacity:.09}"
    ".shardwise .plain{fill:currentColor;fill-opacity:.28}"
    ".shardwise .empty{fill:currentColor;fill-opacity:.03;stroke:currentColor;stroke-opacity:.5;stroke-dasharray:3 2}"
    ".shardwise .here{stroke:currentColor;stroke-width:2.5}"
    ".shardwise .mark:hover rect{stroke:currentColor;stroke-width:2}"
)
ALONE = (
    ".shardwise{color:#1f2328}.shardwise .paper{fill:#fff}"
    "@media(prefers-color-scheme:dark){.shardwise{color:#e6edf3}.shardwise .paper{fill:#0d1117}}"
)

NARROW, WIDE = frozenset(" \xa0.,:;'|!()[]ijlt/–-·"), frozenset("mwMW@%…→↓")


def text_width(text: str, size: float = 12) -> float:
    """About how broad a text is, in the widest of the usual fonts."""
    return size * sum(0.41 if letter in NARROW else 0.98 if letter in WIDE else 0.64 for letter in text)


def shortened(text: str, width: float, size: float = 12) -> str:
    """The text, with its middle left out if it is broader than this."""
    if text_width(text, size) <= width:
        return text
    keep = len(text)
    while keep > 2 and text_width(text[: (keep + 1) // 2] + "…" + text[len(text) - keep // 2 :], size) > width:
        keep -= 1
    return text[: (keep + 1) // 2] + "…" + text[len(text) - keep // 2 :]


def wrap_text(text: str, width: float, size: float = 12) -> list[str]:
    """The text in lines that are no broader than this, unless a word is."""
    lines: list[str] = []
    for word in text.split(" "):
        if lines and text_width(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


@dataclass
class Canvas:
    """Marks of one drawing; its size is what they take."""

    parts: list[str] = field(default_factory=list)
    right: float = 0.0
    bottom: float = 0.0
    fills_row: bool = False  # whether nothing stands beside it

    @property
    def width(self) -> float:
        """Pixels across, margin included."""
        return self.right + MARGIN

    @property
    def height(self) -> float:
        """Pixels down, margin included."""
        return self.bottom + MARGIN

    @contextmanager
    def mark(self, tooltip: str, kind: str = "") -> Iterator[None]:
        """What is drawn within belongs together, and answers the mouse."""
        name = f"mark {kind}".strip()
        self.parts.append(f'<g class="{name}"><title>{escape(tooltip, quote=False)}</title>')
        yield
        self.parts.append("</g>")

    def rect(
        self, x: float, y: float, width: float, height: float, *, css: str = "", fill: str = "", radius: float = 2
    ) -> None:
        """A rectangle."""
        self._reach(x + width, y + height)
        look = (f' class="{css}"' if css else "") + (f' fill="{fill}"' if fill else "")
        radius = min(radius, width / 4, height / 4)
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.3):.1f}" height="{max(height, 0.3):.1f}"'
            f' rx="{radius:.1f}"{look}/>'
        )

    def text(
        self, x: float, y: float, text: str, *, size: float = 12, css: str = "", anchor: str = "start", fill: str = ""
    ) -> None:
        """Text that begins, has its middle or ends at x, on the base line y."""
        broad = text_width(text, size)
        self._reach(x + {"start": broad, "middle": broad / 2, "end": 0.0}[anchor], y + 0.25 * size)
        look = (f' class="{css}"' if css else "") + (f' style="fill:{fill}"' if fill else "")
        where = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}"{where}{look}>{escape(text, quote=False)}</text>'
        )

    def line(self, *points: tuple[float, float]) -> None:
        """A thin line through these points."""
        self._reach(max(x for x, _ in points), max(y for _, y in points))
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline class="line" points="{path}"/>')

    def put(self, other: Canvas, x: float, y: float) -> None:
        """Another drawing, with its corner here."""
        self._reach(x + other.width, y + other.height)
        self.parts.append(f'<g transform="translate({x:.1f} {y:.1f})">{"".join(other.parts)}</g>')

    def _reach(self, right: float, bottom: float) -> None:
        self.right, self.bottom = max(self.right, right), max(self.bottom, bottom)

    def inline(self, label: str) -> str:
        """An ``<svg>`` for within a page that has the style; the label is for those who do not see it."""
        return self._svg(label, 'style="display:block;max-width:none"', "")

    def alone(self, label: str) -> str:
        """An ``<svg>`` that is a file of its own."""
        paper = f'<rect class="paper" width="{self.width:.0f}" height="{self.height:.0f}" rx="6"/>'
        return self._svg(label, 'class="shardwise"', f"<style>{STYLE}{ALONE}</style>{paper}")

    def _svg(self, label: str, look: str, before: str) -> str:
        width, height = f"{self.width:.0f}", f"{self.height:.0f}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'{look} aria-label="{escape(label)}">{before}{"".join(self.parts)}</svg>'
        )
