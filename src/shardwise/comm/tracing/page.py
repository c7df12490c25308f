"""Traces as runs of a report page: what each rank computed, sent, and waited for, in seconds of its host."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from shardwise import report
from shardwise.comm.tracing.events import Collective, Op, TracedRank

HOST = (
    "Times of a trace are those of the host. Compute is ops on sharded tensors, without the time that they wait; what "
    "is computed on plain tensors is not noted."
)


class Interval(NamedTuple):
    """A stretch of time, in seconds since the trace began."""

    start: float
    end: float


def report_of(title: str, runs: Sequence[report.Run], uncached: int = 0) -> report.Report:
    """A page of these runs, some of which are traces; so many calls of them were worked out anew."""
    notes = [HOST]
    if uncached:
        notes.append(f"{uncached} calls were worked out anew: `uncached` of the trace says why.")
    return report.Report(title, runs, notes=notes)


def run_of(traced: Sequence[TracedRank], name: str) -> report.Run:
    """The traces of some ranks as one run."""
    links = [link for one in traced for link in links_of(one)]
    return report.Run(name, traced[0].ranks, [part_of(one) for one in traced], links)


def part_of(traced: TracedRank) -> report.RankPart:
    """The trace of a rank as a part of a run."""
    spans = [*compute_spans(traced.ops, traced.collectives), *collective_spans(traced.collectives)]
    data = [one for one in traced.collectives if not one.is_meeting]
    return report.RankPart(
        ranks=(traced.rank,),
        device=traced.device,
        capacity=traced.capacity,
        seconds=max([traced.seconds, *(span.end for span in spans)]),
        flops=0,
        sent=sum(one.sent for one in data),
        received=sum(one.received for one in data),
        memory=traced.memory,
        spans=spans,
        modules=module_costs(spans, data, traced.kinds),
    )


def links_of(traced: TracedRank) -> list[tuple[int, int, int]]:
    """The bytes that the rank sent to each other one, where that is known."""
    to: dict[int, int] = defaultdict(int)
    for one in traced.collectives:
        if not one.is_meeting:
            for rank, size in (one.to or {}).items():
                to[rank] += size
    return [(traced.rank, rank, size) for rank, size in sorted(to.items())]


def compute_spans(ops: Sequence[Op], collectives: Sequence[Collective]) -> Iterator[report.Span]:
    """The outermost ops of each thread, less the time in which the host waited."""
    waits = without_overlaps(wait for one in collectives if (wait := wait_of(one)) is not None)
    for op in outermost(ops):
        for piece in without(Interval(op.begin, op.begin + op.seconds), waits):
            yield report.Span("compute", op.op, op.module, *piece, line=op.place)


def collective_spans(collectives: Sequence[Collective]) -> Iterator[report.Span]:
    """Each exchange in the lane "transfer"; where the host waited for it, in the lane "wait", too."""
    for one in collectives:
        name, size = f"{one.kind} for {one.op}", 0 if one.is_meeting else one.sent
        yield report.Span("transfer", name, one.module, one.begin, one.begin + one.seconds, size, line=one.place)
        wait = wait_of(one)
        if wait is not None:
            yield report.Span("wait", name, one.module, *wait, line=one.place)


def module_costs(
    spans: Sequence[report.Span], data: Sequence[Collective], kinds: Mapping[str, str]
) -> list[report.ModuleCost]:
    """What each module computed and sent, without the modules within it: the busiest first."""
    seconds: dict[str, float] = defaultdict(float)
    sent: dict[str, int] = defaultdict(int)
    for span in spans:
        if span.lane == "compute":
            seconds[span.module] += span.end - span.start
    for one in data:
        sent[one.module] += one.sent
    paths = sorted({*seconds, *sent}, key=lambda path: -seconds[path])
    return [report.ModuleCost(path, kinds.get(path, ""), seconds[path], 0, sent[path], 0) for path in paths]


# Intervals -----------------------------------------------------------------------------------------------------------


def wait_of(one: Collective) -> Interval | None:
    """When the host waited for a collective: at its end."""
    end = one.begin + one.seconds
    return Interval(end - one.waited, end) if one.waited > 0 else None


def outermost(ops: Sequence[Op]) -> list[Op]:
    """The ops that are within no other op of their thread, in the order in which they began."""
    until: dict[int, float] = {}
    found = []
    for op in sorted(ops, key=lambda op: (op.begin, -op.seconds)):
        if op.begin >= until.get(op.thread, 0.0):
            until[op.thread] = op.begin + op.seconds
            found.append(op)
    return found


def without_overlaps(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in intervals that do not overlap, in order.

    >>> without_overlaps([Interval(4, 5), Interval(0, 2), Interval(1, 3)])
    [Interval(start=0, end=3), Interval(start=4, end=5)]
    """
    found: list[Interval] = []
    for one in sorted(intervals):
        if found and one.start <= found[-1].end:
            found[-1] = Interval(found[-1].start, max(found[-1].end, one.end))
        else:
            found.append(one)
    return found


def without(whole: Interval, holes: Sequence[Interval]) -> Iterator[Interval]:
    """What is left of an interval; the holes do not overlap, and are in order.

    >>> list(without(Interval(0, 9), [Interval(-1, 1), Interval(3, 4), Interval(8, 12)]))
    [Interval(start=1, end=3), Interval(start=4, end=8)]
    """
    start = whole.start
    for hole in holes[bisect_right(holes, start, key=lambda hole: hole.end) :]:
        if hole.start >= whole.end:
            break
        if hole.start > start:
            yield Interval(start, hole.start)
        start = max(start, hole.end)
    if start < whole.end:
        yield Interval(start, whole.end)
