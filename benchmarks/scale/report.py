"""What was found in each world, as tables with a column for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.scale.cases import CASES, DTENSOR, MEMORY_ROW, Case
from benchmarks.scale.world import World
from benchmarks.table import print_lines

NOISE = 1.5, 0.05  # later calls may take so many times what they take in the smallest world, and so many ms more
MOST_MEMORY = 100.0  # MiB


@dataclass(frozen=True)
class Found:
    """A row of one world: seconds, or MiB, or why there are none."""

    ranks: int
    grids: bool
    work: str
    first: float | None = None
    later: float | None = None
    mib: float | None = None
    failed: str | None = None
    why: str | None = None


@dataclass(frozen=True)
class Line:
    """A line of a table: ms or MiB for each world, or why there are none; and the most that there may be."""

    title: str
    values: dict[int, float | str]
    most: float | None = None
    budget: str = ""

    @property
    def over(self) -> bool:
        return self.most is not None and any(isinstance(v, str) or v > self.most for v in self.values.values())

    @property
    def cells(self) -> list[str]:
        values = [value if isinstance(value, str) else figure(value) for value in self.values.values()]
        verdict = "" if self.most is None else "OVER" if self.over else "ok"
        return [self.title, *values, self.budget, verdict]


def figure(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


def lines(found: Sequence[Found], worlds: Sequence[int], *, grids: bool) -> list[Line]:
    """Of all rows that were measured in any of the worlds."""
    rows = {(one.work, one.ranks): one for one in found if one.grids == grids}
    made: list[Line] = []
    for case in CASES + DTENSOR:
        of_case = {ranks: rows.get((case.work, ranks)) for ranks in worlds}
        if any(of_case.values()):
            made += lines_of(case, of_case)
    memory = {ranks: rows.get((MEMORY_ROW, ranks)) for ranks in worlds}
    if any(memory.values()):
        used = {ranks: "no time" if one is None or one.mib is None else one.mib for ranks, one in memory.items()}
        made.append(Line(MEMORY_ROW, used, MOST_MEMORY, f"≤ {MOST_MEMORY:.0f} MiB"))
    return made


def lines_of(case: Case, found: dict[int, Found | None]) -> Iterator[Line]:
    """The first call, a part of it for each of its parameters, and later calls."""

    def values(kind: str, parts: int = 1) -> dict[int, float | str]:
        return {ranks: value_of(one, kind, parts) for ranks, one in found.items()}

    most = case.first if case.held else None
    said = "" if most is None else f"≤ {most:g} ms"
    if case.count == 1:
        yield Line(f"{case.work}: first", values("first"), most, said)
    else:
        yield Line(f"{case.work}: first", values("first"))
        yield Line(f"{case.work}: first, for each", values("first", case.count), most, said)
    if case.later:
        later = values("later")
        least = next(iter(later.values()))
        held = case.held and len(later) > 1 and not isinstance(least, str)
        most = least * NOISE[0] + NOISE[1] if held and not isinstance(least, str) else None
        yield Line(f"{case.work}: later", later, most, f"≤ {NOISE[0]}x {min(later)} ranks" if held else "")


def value_of(found: Found | None, kind: str, parts: int) -> float | str:
    if found is None:
        return "no time"
    seconds: float | None = getattr(found, kind)
    return seconds * 1e3 / parts if seconds is not None else found.failed or "–"


def show(found: Sequence[Found], worlds: Sequence[int]) -> list[Line]:
    """Print a table for each kind of layouts; what is over its budget."""
    made: list[Line] = []
    for grids in (False, True):
        of_kind = lines(found, worlds, grids=grids)
        if not of_kind:
            continue
        print(f"\nWhat one rank pays, {'on 2-d grids' if grids else 'in chunks'}, by the number of ranks (ms)\n")
        heads = [" x ".join(map(str, World(n, grids=True).shape)) if grids else f"{n:,}" for n in worlds]
        print_lines([["work", *heads, "budget", ""], *(line.cells for line in of_kind)])
        made += of_kind
    for why in dict.fromkeys(f"{one.work}, {one.ranks:,} ranks: {one.why}" for one in found if one.why):
        print(f"  {why}")
    return [line for line in made if line.over]
