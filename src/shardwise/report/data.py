"""What a report page shows, as frozen values; `Report.as_json` cuts it down to what the page reads."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ReportError, ReportKindError
from shardwise.report.boxes import rank_ranges, traffic_blocks
from shardwise.report.shared import Layouts, Strings
from shardwise.report.thinning import Bar, busy_seconds, kept_points, merged_bars

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer states",
    "activations",
    "gathered",
    "transfers",
    "temporaries",
    "other",
)

MOST_POINTS = 2_000  # of one rank's memory series
MOST_SPANS = 5_000  # of one rank's timeline
MOST_ALIVE = 400
MOST_MODULES = 1_500
MOST_DETAILED = 32  # parts of a run with series, spans and modules; of the others, only the sums
ALL_PARTS = 4  # the bounds above, times this, hold for all parts of a run together


@dataclass(frozen=True)
class Alive:
    """What is in memory at a time, summed up for one category, module and line."""

    category: str
    module: str
    line: str
    bytes: int
    count: int


@dataclass(frozen=True)
class Memory:
    """The memory of a rank over time. `marks` are (time, text), such as "backward begins"."""

    times: Sequence[float]  # seconds since the step began, ascending
    series: Mapping[str, Sequence[int]]  # category -> bytes at these times
    peak: int
    peak_time: float
    alive: Sequence[Alive]  # at the peak, largest first
    marks: Sequence[tuple[float, str]] = ()

    def __post_init__(self) -> None:
        for category, values in self.series.items():
            if len(values) != len(self.times):
                raise ReportError(f"the series {category!r} has {len(values)} values for {len(self.times)} times")

    def as_json(self, strings: Strings, parts: int) -> dict[str, Any]:
        """For the page; `parts` share the bounds."""
        names = [name for name in CATEGORIES if any(self.series.get(name, ()))]
        names += [name for name in self.series if name not in CATEGORIES and any(self.series[name])]
        peak_at = max(bisect_right(self.times, self.peak_time) - 1, 0)
        columns = [self.series[name] for name in names]
        kept = kept_points(columns, len(self.times), _share(MOST_POINTS, parts), always=peak_at)
        unit = 1
        while self.peak // unit >= 1 << 22:
            unit *= 2
        shown = self.alive[: _share(MOST_ALIVE, parts)]
        rest = self.alive[len(shown) :]
        return {
            "times": [_rounded(self.times[k]) for k in kept],
            "unit": unit,
            "series": [[name, [round(self.series[name][k] / unit) for k in kept]] for name in names],
            "peak": self.peak,
            "peakTime": self.peak_time,
            "peakAt": bisect_left(kept, peak_at),
            "alive": [
                [strings.place(a.category), strings.place(a.module), strings.place(a.line), a.bytes, a.count]
                for a in shown
            ],
            "aliveRest": [len(rest), sum(a.bytes for a in rest)],
            "marks": [[time, text] for time, text in self.marks],
        }


@dataclass(frozen=True)
class Span:
    """Something that takes time in a step, in the lane "compute", "transfer" or "wait"."""

    lane: str
    name: str
    module: str
    start: float
    end: float
    bytes: int = 0
    flops: int = 0
    line: str = ""


@dataclass(frozen=True)
class ModuleCost:
    """What one module costs in a step."""

    path: str
    kind: str
    seconds: float
    flops: int
    bytes: int  # sent by this rank
    memory: int  # activations kept for backward


@dataclass(frozen=True)
class RankPart:
    """One rank of a run, or several that are alike."""

    ranks: Sequence[int]
    device: str
    capacity: int | None
    seconds: float
    flops: int
    sent: int
    received: int
    memory: Memory | None
    spans: Sequence[Span]
    modules: Sequence[ModuleCost]

    def as_json(self, strings: Strings, parts: int, *, detailed: bool) -> dict[str, Any]:
        """For the page; `parts` share the bounds. Without details, only the sums."""
        bars = [Bar(s.lane, s.name, s.module, s.start, s.end, s.bytes, s.flops, s.line) for s in self.spans]
        result: dict[str, Any] = {
            "ranks": rank_ranges(self.ranks),
            "device": self.device,
            "capacity": self.capacity,
            "seconds": self.seconds,
            "flops": self.flops,
            "sent": self.sent,
            "received": self.received,
            "peak": self.memory.peak if self.memory else None,
            "busy": busy_seconds(bars),
            "detailed": detailed,
        }
        if detailed:
            modules = sorted(self.modules, key=lambda m: m.seconds, reverse=True)[: _share(MOST_MODULES, parts)]
            result["memory"] = self.memory.as_json(strings, parts) if self.memory else None
            result["spanCount"] = len(bars)
            result["spans"] = [_bar_json(bar, strings) for bar in merged_bars(bars, _share(MOST_SPANS, parts))]
            result["moduleCount"] = len(self.modules)
            result["modules"] = [
                [strings.place(m.path), strings.place(m.kind), _rounded(m.seconds), m.flops, m.bytes, m.memory]
                for m in modules
            ]
        return result


@dataclass(frozen=True)
class Run:
    """A step as it was predicted or measured, or under one plan; `links` are (from rank, to rank, bytes)."""

    name: str
    world: int
    parts: Sequence[RankPart]
    links: Sequence[tuple[int, int, int]]

    def as_json(self, strings: Strings) -> dict[str, Any]:
        """For the page. Details only of the slowest part, of the one with the highest peak, and of the first ones."""
        order = list(range(len(self.parts)))
        slowest = max(order, key=lambda k: self.parts[k].seconds, default=0)
        fullest = max(order, key=lambda k: m.peak if (m := self.parts[k].memory) else 0, default=0)
        detailed = list(dict.fromkeys([slowest, fullest, *order]))[:MOST_DETAILED]
        block, cells = traffic_blocks(self.links, self.world)
        return {
            "name": self.name,
            "world": self.world,
            "parts": [p.as_json(strings, len(detailed), detailed=k in detailed) for k, p in enumerate(self.parts)],
            "traffic": {"block": block, "cells": cells},
        }


def as_runs(others: Iterable[Any]) -> list[Run]:
    """The runs of estimates and traces."""
    found = []
    for other in others:
        if not hasattr(other, "as_run"):
            raise ReportKindError(
                "a page shows estimates and traces: save takes a path and any number of them, as in "
                f"needs.save('report.html', trace); found {type(other).__name__}"
            )
        found.append(other.as_run())
    return found


@dataclass(frozen=True)
class BoxOnRank:
    """A box of a parameter, and the rank that holds it."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class ParameterRow:
    """A parameter of the model. `placed` says its layout in words: "cut along dim 0 over 4 ranks"."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    layout: Sequence[BoxOnRank]
    placed: str

    def as_json(self, layouts: Layouts) -> list[Any]:
        """For the page."""
        place = layouts.place(tuple((box.rank, tuple(box.offsets), tuple(box.sizes)) for box in self.layout))
        return [self.name, self.shape, self.dtype, self.bytes, place, self.placed]


@dataclass(frozen=True)
class ModuleRow:
    """A module of the model; dots in its path make the tree, and "" is the model."""

    path: str
    kind: str
    parameters: Sequence[ParameterRow]

    def as_json(self, layouts: Layouts) -> list[Any]:
        """For the page."""
        return [self.path, self.kind, [parameter.as_json(layouts) for parameter in self.parameters]]


@dataclass(frozen=True)
class PlanRow:
    """A sharding plan among others: what it costs, whether it fits, and why it was or was not chosen."""

    name: str
    seconds: float | None
    peak: int | None
    capacity: int | None
    fits: bool | None
    chosen: bool
    reason: str


@dataclass(frozen=True)
class Report:
    """All that a page shows; what is empty has no section."""

    title: str
    runs: Sequence[Run]
    modules: Sequence[ModuleRow] = ()
    plans: Sequence[PlanRow] = ()
    notes: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """What the page reads: bounded in size, whatever the number of ranks, parameters and spans."""
        strings, layouts = Strings(), Layouts()
        runs = [run.as_json(strings) for run in self.runs]
        return {
            "title": self.title,
            "categories": CATEGORIES,
            "runs": runs,
            "modules": [module.as_json(layouts) for module in self.modules],
            "layouts": layouts.drawn,
            "plans": [vars(plan) for plan in self.plans],
            "notes": list(self.notes),
            "strings": list(strings.places),
        }


def _bar_json(bar: Bar, strings: Strings) -> list[float]:
    lane, name, module, line = (strings.place(text) for text in (bar.lane, bar.name, bar.module, bar.line))
    return [lane, name, module, _rounded(bar.start), _rounded(bar.end), bar.bytes, bar.flops, line, bar.merged]


def _share(most: int, parts: int) -> int:
    return min(most, ALL_PARTS * most // max(parts, 1))


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.7g}")
