"""Rows of measurements, printed as one table."""

from __future__ import annotations

from dataclasses import dataclass

COLUMNS = ("shardwise", "plain", "DTensor", "_shard")


@dataclass(frozen=True)
class Row:
    """One piece of work: seconds per contender, and the budget it is held to."""

    work: str
    seconds: dict[str, float]
    budget: str = ""
    limit: tuple[str, float] | None = None  # contender, most times its seconds

    @property
    def verdict(self) -> str:
        if self.limit is None:
            return ""
        other, most = self.limit
        return "ok" if self.seconds["shardwise"] <= most * self.seconds[other] else "OVER"


def duration(seconds: float) -> str:
    for unit, scale in (("µs", 1e6), ("ms", 1e3)):
        if seconds * scale < 1000:
            return f"{seconds * scale:.{2 if seconds * scale < 10 else 1}f} {unit}"
    return f"{seconds:.2f} s"


def cell(row: Row, name: str) -> str:
    if name not in row.seconds:
        return "–"
    text = duration(row.seconds[name])
    return text if name == "shardwise" else f"{text} ({row.seconds['shardwise'] / row.seconds[name]:.2f}x)"


def show(title: str, rows: list[Row]) -> None:
    print(f"\n{title}")
    print("(in brackets: shardwise's time divided by that one's; below 1 is faster)\n")
    lines = [["work", *COLUMNS, "budget", ""]]
    lines += [[row.work, *(cell(row, name) for name in COLUMNS), row.budget, row.verdict] for row in rows]
    widths = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
    for number, line in enumerate(lines):
        print("  " + "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
        if number == 0:
            print("  " + "  ".join("─" * width for width in widths))
