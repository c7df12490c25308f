"""`Console`: prints tables that fit the terminal, plain text elsewhere, or JSON; progress goes to stderr."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from shardwise.checkpoint.progress import Progress

WIDEST = 160  # columns used on wider terminals
NARROWEST = 40
LEAST_NAME = 12  # least width of a wide column
GAP = "  "


@dataclass(frozen=True)
class Column:
    """A column of a table. The cells of a ``wide`` column are wrapped where the table does not fit."""

    title: str
    right: bool = False
    wide: bool = False


def names(title: str = "tensor") -> Column:
    """A column of long names."""
    return Column(title, wide=True)


def numbers(title: str) -> Column:
    """A column of numbers."""
    return Column(title, right=True)


class Console:
    """Where a command prints."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.is_terminal = not as_json and sys.stdout is not None and sys.stdout.isatty()
        self._rich = _rich_console() if self.is_terminal else None

    @property
    def width(self) -> int:
        """The columns of the terminal; the most if the output is no terminal."""
        if not self.is_terminal and "COLUMNS" not in os.environ:
            return WIDEST
        return min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)

    def give(self, answer: Any) -> None:
        """Print the answer as JSON, with ``--json``."""
        if self.as_json:
            print(json.dumps(_jsonable(answer), indent=1, ensure_ascii=False, allow_nan=False))

    def line(self, text: str = "", style: str = "") -> None:
        """Print a line, unless with ``--json``."""
        if self.as_json:
            return
        if self._rich is not None and style:
            self._rich.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text)

    def facts(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Print a line for each pair of a word and its value."""
        longest = max((len(word) for word, _ in pairs), default=0)
        room = max(self.width - longest - len(GAP), LEAST_NAME)
        for word, value in pairs:
            first, *more = textwrap.wrap(value, room, break_on_hyphens=False) or [""]
            self._marked(word.ljust(longest), GAP + first, "bold")
            for rest in more:
                self.line(" " * longest + GAP + rest)

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]], title: str = "") -> None:
        """Print a table, unless with ``--json``."""
        if self.as_json:
            return
        if title:
            self.line(title, "bold")
        widths = _column_widths(columns, rows, self.width)
        self.line(_row(columns, [column.title for column in columns], widths), "dim")
        for row in rows:
            cells = [_wrap_cell(cell, width) for cell, width in zip(row, widths, strict=True)]
            for number in range(max(map(len, cells))):
                parts = [part[number] if number < len(part) else "" for part in cells]
                self.line(_row(columns, parts, widths))

    def listing(self, title: str, items: Sequence[str], most: int, style: str = "yellow") -> None:
        """Print a title and, in lines that fit, the first of the items, and how many more there are."""
        self.line(title, style)
        more = f" and {len(items) - most:,} more" if len(items) > most else ""
        text = ", ".join(items[:most]) + more
        for line in textwrap.wrap(text, self.width - 2, break_on_hyphens=False, break_long_words=False):
            self.line(f"  {line}")

    def note(self, text: str) -> None:
        """Print a remark on stderr."""
        print(f"shardwise: {text}", file=sys.stderr)

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Callable[[int], object]]:
        """A progress bar on stderr, if that is a terminal; gives the function that counts bytes."""
        if self.as_json or not sys.stderr.isatty():
            yield lambda _: None
            return
        with Progress(what, total, transient=True) as bar:
            yield bar.advance

    def _marked(self, word: str, rest: str, style: str) -> None:
        if self._rich is None or self.as_json:
            self.line(word + rest)
        else:
            self._rich.print(word, style=style, end="", markup=False, highlight=False)
            print(rest)


def _rich_console() -> Any:
    """The console of rich; None where rich is not installed."""
    try:
        from rich.console import Console as Rich
    except ImportError:
        return None
    return Rich(highlight=False)


def _column_widths(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """The widths of the columns, reduced to fit ``width`` if possible."""
    widths = [max([len(column.title), *(len(row[k]) for row in rows)]) for k, column in enumerate(columns)]
    over = sum(widths) + len(GAP) * (len(columns) - 1) - width
    for k in sorted((k for k, column in enumerate(columns) if column.wide), key=lambda k: -widths[k]):
        if over > 0:
            kept = max(widths[k] - over, min(widths[k], LEAST_NAME))
            over -= widths[k] - kept
            widths[k] = kept
    return widths


def _wrap_cell(text: str, width: int) -> list[str]:
    """A cell in lines of at most ``width``, broken between parts of a name if possible."""
    lines = []
    while len(text) > width:
        at = max(text.rfind(mark, width // 3, width) for mark in " /.,") + 1
        at = at if at > 0 else width
        lines.append(text[:at].rstrip())
        text = text[at:]
    return [*lines, text]


def _row(columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int]) -> str:
    placed = [
        cell.rjust(width) if column.right else cell.ljust(width)
        for column, cell, width in zip(columns, cells, widths, strict=True)
    ]
    return GAP.join(placed).rstrip()


def _jsonable(value: Any) -> Any:
    """A value for JSON; other types as their repr."""
    if isinstance(value, dict):
        return {str(key): _jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
