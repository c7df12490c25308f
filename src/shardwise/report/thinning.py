"""Long series and many spans, cut down to what a screen can show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Bar(NamedTuple):
    """A span of the timeline, or several short ones that are drawn as one."""

    lane: str
    name: str
    module: str
    start: float
    end: float
    bytes: int
    flops: int
    line: str
    merged: int = 1


def kept_points(series: Sequence[Sequence[int]], length: int, most: int, *, always: int = 0) -> list[int]:
    """The indices of at most `most` points: of each stretch of time, where the sum is largest and where smallest.

    The first and the last point are kept, the maximum of every series, and the point `always`.
    """
    if length <= most:
        return list(range(length))
    totals = [sum(values) for values in zip(*series, strict=True)] if series else [0] * length
    kept = {0, always, length - 1, max(range(length), key=totals.__getitem__)}
    kept.update(max(range(length), key=values.__getitem__) for values in series)
    stretches = max((most - len(kept)) // 2, 1)
    for number in range(stretches):
        stretch = range(number * length // stretches, (number + 1) * length // stretches)
        kept.add(max(stretch, key=totals.__getitem__))
        kept.add(min(stretch, key=totals.__getitem__))
    return sorted(kept)


def merged_bars(bars: Sequence[Bar], most: int) -> list[Bar]:
    """At most `most` bars by their starts: the longest as they are, short neighbours in one lane as one bar."""
    if len(bars) <= most:
        return sorted(bars, key=lambda bar: bar.start)
    by_length = sorted(range(len(bars)), key=lambda k: bars[k].start - bars[k].end)
    long = set(by_length[: most // 4])
    begin = min(bar.start for bar in bars)
    lanes = sorted({bar.lane for bar in bars})
    cells = max((most // 4) // len(lanes), 1)
    cell = (max(bar.end for bar in bars) - begin) / cells or 1.0
    result = []
    for lane in lanes:
        run: list[Bar] = []
        place = -1
        for k in sorted((k for k, bar in enumerate(bars) if bar.lane == lane), key=lambda k: bars[k].start):
            bar = bars[k]
            here = min(int((bar.start - begin) / cell), cells - 1)
            if run and (k in long or here != place):
                result.append(_as_one(run))
                run = []
            if k in long:
                result.append(bar)
            else:
                run.append(bar)
                place = here
        if run:
            result.append(_as_one(run))
    return sorted(result, key=lambda bar: bar.start)


def busy_seconds(bars: Sequence[Bar]) -> dict[str, float]:
    """For each lane, how long something was in it; overlapping spans count once."""
    result: dict[str, float] = {}
    until: dict[str, float] = {}
    for bar in sorted(bars, key=lambda bar: bar.start):
        start = max(bar.start, until.get(bar.lane, bar.start))
        result[bar.lane] = result.get(bar.lane, 0.0) + max(bar.end - start, 0.0)
        until[bar.lane] = max(bar.end, start)
    return result


def _as_one(run: Sequence[Bar]) -> Bar:
    if len(run) == 1:
        return run[0]
    names, modules, lines = ({getattr(bar, field) for bar in run} for field in ("name", "module", "line"))
    return Bar(
        run[0].lane,
        names.pop() if len(names) == 1 else "short spans",
        modules.pop() if len(modules) == 1 else "",
        run[0].start,
        max(bar.end for bar in run),
        sum(bar.bytes for bar in run),
        sum(bar.flops for bar in run),
        lines.pop() if len(lines) == 1 else "",
        sum(bar.merged for bar in run),
    )
