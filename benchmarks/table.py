"""Rows of measurements, printed as one table."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

COLUMNS = (
    "shardwise",
    "unverified",
    "own batches",
    "plain",
    "by hand",
    "DTensor",
    "_shard",
    "torch.save",
    "DCP",
    "broadcast",
)  # shown where somebody runs in them


@dataclass(frozen=True)
class Row:
    """One piece of work: seconds per contender, infinite for one that raises, and the budget it is held to."""

    work: str
    seconds: dict[str, float]
    budget: str = ""
    limit: tuple[str, float] | None = None  # contender, most times its seconds
    raised: dict[str, str] = field(default_factory=dict)  # by contender, what it said
    limits: tuple[tuple[str, float], ...] = ()  # where there are several

    @property
    def verdict(self) -> str:
        if "shardwise" in self.raised:
            return "RAISES"
        limits = self.limits if self.limit is None else (self.limit, *self.limits)
        if not limits:
            return ""
        held = all(self.seconds["shardwise"] <= most * self.seconds[other] for other, most in limits)
        return "ok" if held else "OVER"


def duration(seconds: float) -> str:
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        if seconds * scale < 1000:
            return f"{seconds * scale:.{2 if seconds * scale < 10 else 1}f} {unit}"
    return f"{seconds:.2f} s"


def cell(row: Row, name: str) -> str:
    if name not in row.seconds:
        return "–"
    if math.isinf(row.seconds[name]):
        return "raises"
    text = duration(row.seconds[name])
    if name == "shardwise" or math.isinf(row.seconds["shardwise"]):
        return text
    return f"{text} ({row.seconds['shardwise'] / row.seconds[name]:.2f}x)"


def show(title: str, rows: list[Row]) -> None:
    print(f"\n{title}")
    print("(in brackets: shardwise's time divided by that one's; below 1 is faster)\n")
    columns = [name for name in COLUMNS if any(name in row.seconds for row in rows)]
    lines = [["work", *columns, "budget", ""]]
    lines += [[row.work, *(cell(row, name) for name in columns), row.budget, row.verdict] for row in rows]
    print_lines(lines)
    for row in rows:
        for name, why in row.raised.items():
            print(f"  {row.work}: {name} raises {why}")


def print_lines(lines: list[list[str]]) -> None:
    """The first line as the head of the columns, which are as wide as need be."""
    widths = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
    for number, line in enumerate(lines):
        print("  " + "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
        if number == 0:
            print("  " + "  ".join("─" * width for width in widths))


def show_fractions(title: str, found: list[tuple[str, dict[str, float]]]) -> None:
    """Each contender's figure and, beside it, how many times shardwise's that is."""
    print(f"\n{title}")
    for what, fractions in found:
        print(f"\n  {what}")
        least = fractions["shardwise"]
        for name, fraction in fractions.items():
            ratio = "" if name == "shardwise" else f"  ({fraction / least:.2f}x shardwise's)"
            print(f"    {name.ljust(max(map(len, fractions)))}  {fraction:.3f}{ratio}")
