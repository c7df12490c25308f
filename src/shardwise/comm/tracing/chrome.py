"""Traces as Chrome trace events, which Perfetto and chrome://tracing open: a process for each rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from shardwise.comm.tracing.events import Collective, Op, TracedRank
from shardwise.report import Memory

Json = dict[str, Any]
COLLECTIVES = 1  # the track of them; ops have one for each thread
MEMORY = "allocated"


def chrome_events(traced: TracedRank) -> list[Json]:
    """One list for a rank. Lists of several ranks may be put together."""
    rank, clock, ops = traced.rank, traced.clock, traced.ops
    tracks = {thread: COLLECTIVES + 1 + k for k, thread in enumerate(sorted({op.thread for op in ops}))}
    about = {name: getattr(traced, name) for name in ("ranks", "clock", "seconds", "kinds", "device", "capacity")}
    events: list[Json] = [_name("process_name", rank, 0, f"rank {rank}", **about)]
    events.append(_name("thread_name", rank, COLLECTIVES, "collectives"))
    events += [_name("thread_name", rank, track, "ops") for track in tracks.values()]
    for op in ops:
        where = {"pid": rank, "tid": tracks[op.thread]}
        times = {"ts": _micros(clock + op.begin), "dur": _micros(op.seconds)}
        events.append({"name": op.op, "cat": "op", "ph": "X", **where, **times, "args": _said(op)})
    for one in traced.collectives:
        track: Json = {
            "pid": rank,
            "tid": COLLECTIVES,
            "id": f"{rank}-{one.number}",
            "cat": "collective",
            "name": one.kind,
        }
        begin, end = _micros(clock + one.begin), _micros(clock + one.begin + one.seconds)
        told = {"op": one.op, "sent": one.sent, "received": one.received, "waited ms": one.waited * 1e3}
        to = {} if one.to is None else {"to": one.to}
        events.append({**track, "ph": "b", "ts": begin, "args": {**told, **to, **_said(one)}})
        events.append({**track, "ph": "e", "ts": end})
    if traced.memory is not None:
        for time, size in zip(traced.memory.times, traced.memory.series[MEMORY], strict=True):
            counter = {"name": "memory", "ph": "C", "pid": rank, "ts": _micros(clock + time)}
            events.append({**counter, "args": {MEMORY: size}})
    return events


def write(path: str | Path, events: list[Json]) -> None:
    """As a file."""
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def read(paths: Iterable[str | Path]) -> list[Json]:
    """The events of some files."""
    return [event for path in paths for event in json.loads(Path(path).read_text())["traceEvents"]]


def _name(kind: str, rank: int, track: int, name: str, **more: Any) -> Json:
    return {"name": kind, "ph": "M", "pid": rank, "tid": track, "args": {"name": name, **more}}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _said(one: Collective | Op) -> Json:
    return {"place": one.place, "module": one.module}


# Read again ----------------------------------------------------------------------------------------------------------


def traced_ranks(events: Sequence[Json]) -> list[TracedRank]:
    """The ranks that events are of, as `chrome_events` wrote them."""
    by_rank: dict[int, list[Json]] = {}
    for event in events:
        by_rank.setdefault(event["pid"], []).append(event)
    return [_traced_rank(rank, by_rank[rank]) for rank in sorted(by_rank)]


def _traced_rank(rank: int, events: Sequence[Json]) -> TracedRank:
    (about,) = (event["args"] for event in events if event["name"] == "process_name")
    clock = about["clock"]
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    collectives = [_collective(event, ends[event["id"]], clock) for event in events if event["ph"] == "b"]
    ops = [_op(event, clock) for event in events if event["ph"] == "X"]
    memory = _memory([event for event in events if event["ph"] == "C"], clock)
    known = {name: about[name] for name in ("ranks", "clock", "seconds", "kinds", "device", "capacity")}
    return TracedRank(rank=rank, collectives=collectives, ops=ops, memory=memory, **known)


def _collective(event: Json, end: float, clock: float) -> Collective:
    said = event["args"]
    return Collective(
        number=int(event["id"].rpartition("-")[2]),
        op=said["op"],
        place=said["place"],
        module=said["module"],
        kind=event["name"],
        sent=said["sent"],
        received=said["received"],
        begin=max(event["ts"] / 1e6 - clock, 0.0),
        seconds=(end - event["ts"]) / 1e6,
        waited=said["waited ms"] / 1e3,
        to={int(peer): size for peer, size in said["to"].items()} if "to" in said else None,
    )


def _op(event: Json, clock: float) -> Op:
    said = event["args"]
    begin, seconds = max(event["ts"] / 1e6 - clock, 0.0), event["dur"] / 1e6
    return Op(event["name"], said["place"], said["module"], begin, seconds, event["tid"])


def _memory(events: Sequence[Json], clock: float) -> Memory | None:
    if not events:
        return None
    times, sizes = [event["ts"] / 1e6 - clock for event in events], [event["args"][MEMORY] for event in events]
    peak = max(sizes)
    return Memory(times, {MEMORY: sizes}, peak, times[sizes.index(peak)], ())
