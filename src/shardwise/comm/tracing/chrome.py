"""Traces as Chrome trace events, which Perfetto and chrome://tracing open: a process for each rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.comm.tracing.events import Collective, Op

Json = dict[str, Any]
COLLECTIVES = 1  # the track of them; ops have one for each thread


def chrome_events(rank: int, clock: float, collectives: Sequence[Collective], ops: Sequence[Op]) -> list[Json]:
    """One list for a rank, whose trace began at this time of day. Lists of several ranks may be put together."""
    tracks = {thread: COLLECTIVES + 1 + k for k, thread in enumerate(sorted({op.thread for op in ops}))}
    events: list[Json] = [_name("process_name", rank, 0, f"rank {rank}")]
    events.append(_name("thread_name", rank, COLLECTIVES, "collectives"))
    events += [_name("thread_name", rank, track, "ops") for track in tracks.values()]
    for op in ops:
        where = {"pid": rank, "tid": tracks[op.thread]}
        times = {"ts": _micros(clock + op.begin), "dur": _micros(op.seconds)}
        events.append({"name": op.op, "cat": "op", "ph": "X", **where, **times, "args": _said(op)})
    for one in collectives:
        track: Json = {
            "pid": rank,
            "tid": COLLECTIVES,
            "id": f"{rank}-{one.number}",
            "cat": "collective",
            "name": one.kind,
        }
        begin, end = _micros(clock + one.begin), _micros(clock + one.begin + one.seconds)
        told = {"op": one.op, "sent": one.sent, "received": one.received, "waited ms": one.waited * 1e3}
        events.append({**track, "ph": "b", "ts": begin, "args": {**told, **_said(one)}})
        events.append({**track, "ph": "e", "ts": end})
    return events


def write(path: str | Path, events: list[Json]) -> None:
    """As a file."""
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def merge(paths: Sequence[str | Path], into: str | Path) -> None:
    """Put the files that the ranks have saved together into one, with a process for each rank."""
    write(into, [event for path in paths for event in json.loads(Path(path).read_text())["traceEvents"]])


def _name(kind: str, rank: int, track: int, name: str) -> Json:
    return {"name": kind, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _said(one: Collective | Op) -> Json:
    return {"place": one.place, "module": one.module}
