"""What was found in each world, as tables with a column for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.scale.cases import CASES, DTENSOR, INDEX_ROW, MEMORY_ROW, Case
from benchmarks.scale.irregular import IRREGULAR, RANKS
from benchmarks.scale.world import World
from benchmarks.table import print_lines

NOISE = 2, 0.05  # what should not grow may be so many times what it is in the first column, and so many ms more
MOST_MEMORY = 100.0  # MiB
TITLES = {
    "chunks": "What one rank pays, in chunks, by the number of ranks (ms)",
    "grids": "What one rank pays, on 2-d grids, by their shape (ms)",
    "tables": f"Irregular layouts over {RANKS:,} ranks, by the number of tables (ms)",
}


@dataclass(frozen=True)
class Found:
    """A row of one world, or of so many tables: seconds, or MiB, or why there are none."""

    number: int
    kind: str
    work: str
    first: float | None = None
    later: float | None = None
    mib: float | None = None  # or KiB
    count: float = 1  # of parameters or boxes
    failed: str | None = None
    why: str | None = None

    def ms(self, which: str) -> float | str:
        seconds: float | None = getattr(self, which)
        return seconds * 1e3 if seconds is not None else self.failed or "–"


Values = dict[int, float | str]


@dataclass(frozen=True)
class Line:
    """A line of a table: a figure for each column, or why there is none; and the most that there may be."""

    title: str
    values: Values
    most: float | None = None
    budget: str = ""

    @staticmethod
    def even(title: str, values: Values, *, held: bool) -> Line:
        """One whose figures should not grow."""
        (smallest, least), *others = values.items()
        if not (held and others) or isinstance(least, str):
            return Line(title, values)
        return Line(title, values, least * NOISE[0] + NOISE[1], f"≤ {NOISE[0]}x that of {smallest:,}")

    @property
    def over(self) -> bool:
        return self.most is not None and any(isinstance(v, str) or v > self.most for v in self.values.values())

    @property
    def cells(self) -> list[str]:
        values = [value if isinstance(value, str) else figure(value) for value in self.values.values()]
        return [self.title, *values, self.budget, "" if self.most is None else "OVER" if self.over else "ok"]


def figure(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


def lines_of(case: Case[Any], found: dict[int, Found | None]) -> Iterator[Line]:
    """The first call and later ones, and what that is for each of the things it is made of."""
    for which in ("first", "later") if case.later else ("first",):
        title = f"{case.work}: {which}"
        values = {number: "no time" if one is None else one.ms(which) for number, one in found.items()}
        if case.each:
            yield Line(title, values)
            title += f", for each {case.each}"
            values = {number: divided(values[number], one) for number, one in found.items()}
        if which == "first" and case.first is not None:
            yield Line(title, values, case.first, f"≤ {case.first:g} ms")
        else:
            yield Line.even(title, values, held=case.held and (case.even or which == "later"))


def divided(value: float | str, found: Found | None) -> float | str:
    return value if isinstance(value, str) or found is None else value / found.count


def lines(found: Sequence[Found], kind: str, numbers: Sequence[int]) -> list[Line]:
    """Of all rows that were measured in any of the columns."""
    rows = {(one.work, one.number): one for one in found if one.kind == kind}
    made: list[Line] = []
    every: list[Case[Any]] = [*CASES, *DTENSOR, *IRREGULAR]
    for case in every:
        of_case = {number: rows.get((case.work, number)) for number in numbers}
        if any(of_case.values()):
            made += lines_of(case, of_case)
    used = {number: amount(rows.get((MEMORY_ROW, number))) for number in numbers}
    if kind == "tables":
        return [*made, Line(MEMORY_ROW, used)]
    if any((INDEX_ROW, number) in rows for number in numbers):
        made += index_lines({number: amount(rows.get((INDEX_ROW, number))) for number in numbers})
    return [*made, Line(MEMORY_ROW, used, MOST_MEMORY, f"≤ {MOST_MEMORY:.0f} MiB")]


def index_lines(sizes: Values) -> Iterator[Line]:
    """The size of an index, and by how much it grows with each rank."""
    yield Line(INDEX_ROW, sizes)
    (first, least), *others = sizes.items()
    grown: Values = {first: "–"}
    for number, size in others:
        known = isinstance(size, float) and isinstance(least, float)
        grown[number] = (size - least) / (number - first) * 1024 if known else "–"  # type: ignore[operator]
    yield Line(f"{INDEX_ROW.removesuffix('(KiB)')}for each further rank (bytes)", grown)


def amount(found: Found | None) -> float | str:
    return "no time" if found is None or found.mib is None else found.mib


def show(found: Sequence[Found], columns: Mapping[str, Sequence[int]]) -> list[Line]:
    """Print a table for each kind of layouts; what is over its budget."""
    made: list[Line] = []
    for kind, numbers in columns.items():
        of_kind = lines(found, kind, numbers)
        print(f"\n{TITLES[kind]}\n")
        heads = [" x ".join(map(str, World(n, grids=True).shape)) if kind == "grids" else f"{n:,}" for n in numbers]
        print_lines([["work", *heads, "budget", ""], *(line.cells for line in of_kind)])
        made += of_kind
    for why in dict.fromkeys(f"{one.work}, {one.kind} of {one.number:,}: {one.why}" for one in found if one.why):
        print(f"  {why}")
    return [line for line in made if line.over]
