"""`trace`: a record of each collective while it is on. Whoever talks to other ranks says so here, if `running`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise import report
from shardwise.comm.tracing.chrome import chrome_events, write
from shardwise.comm.tracing.events import Collective, Op, Origin, TracedRank, UncachedCall
from shardwise.comm.tracing.memory import MemoryLog
from shardwise.comm.tracing.origin import Origins, name_of
from shardwise.comm.tracing.page import report_of, run_of
from shardwise.comm.tracing.table import show
from shardwise.errors import ReportError
from shardwise.settings import ContextValue

T = TypeVar("T")
running = 0  # traces in this process: while there is none, nobody asks for one


class Trace:
    """What this rank sent, received and waited for, collective by collective.

    Printed, a table; in a notebook, the page that `save` writes. ``events`` are the collectives and meetings, in the
    order in which they ended, ``ops`` the ops on sharded tensors, ``uncached`` the calls that were worked out anew,
    each with the reason, ``memory`` what was allocated on the GPU.
    """

    is_forecast = False  # whether it tells what would be sent
    foresees_programs = False  # whether calls without data are cached, as calls with data are
    sets_up = False  # whether nobody wants to know what is sent to set up a step
    foreseen = ""  # the type of device on which that would be, if not that of the tensors

    def __init__(self) -> None:
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.events: list[Collective] = []
        self.ops: list[Op] = []
        self.uncached: list[UncachedCall] = []
        self.seconds = 0.0
        self.memory: MemoryLog | None = None  # of the GPU, where there is one
        self._origins = Origins()
        self._lock = threading.Lock()
        self._begun, self._clock = time.perf_counter(), time.time()

    def now(self) -> float:
        """Seconds since the trace began."""
        return time.perf_counter() - self._begun

    def count(self) -> int:
        """How many collectives there were, without meetings."""
        return sum(not event.is_meeting for event in self.events)

    def begin(self, said: dict[str, Any]) -> Begun | None:
        """A collective begins."""
        return Begun(self, said)

    def note_memory(self) -> None:
        """What is in the memory of the GPU now, where that is counted."""
        if self.memory is not None:
            with self._lock:
                self.memory.note(self.now())

    def buffer(self, tensor: torch.Tensor) -> None:
        """A tensor is memory of a collective, besides what it is given and what it gives."""

    def add(self, origin: Origin, **said: Any) -> None:
        """One more collective."""
        with self._lock:
            number = len(self.events) + 1
            self.events.append(Collective(number, origin.op, origin.place, origin.module, **said))

    # Shown -----------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path, *others: Any) -> None:
        """Write the trace to a file.

        A path that ends with ``.html`` gets a page that needs no other file; other traces or estimates are shown beside
        this one. Any other path gets Chrome trace events, which Perfetto opens: one file for each rank, and `merge`
        joins them, also to a page.
        """
        if Path(path).suffix == ".html":
            report.save_page(self.report(*others), path)
        elif others:
            raise ReportError(f"only a page shows several runs: the path should end with .html, found '{path}'")
        else:
            write(path, chrome_events(self.traced_rank))

    def as_run(self, name: str = "measured") -> report.Run:
        """The trace as one run of a report, which has this rank alone."""
        return run_of([self.traced_rank], name)

    def report(self, *others: Any) -> report.Report:
        """A page of this trace, and of other traces or estimates beside it."""
        runs = [self.as_run(), *report.as_runs(others)]
        return report_of(f"rank {self.rank} of {self.ranks}", runs, len(self.uncached))

    @property
    def traced_rank(self) -> TracedRank:
        """What there is to write of this rank."""
        log = self.memory
        return TracedRank(
            rank=self.rank,
            ranks=self.ranks,
            clock=self._clock,
            seconds=self.seconds,
            collectives=self.events,
            ops=self.ops,
            kinds=self._origins.kinds,
            device="CPU" if log is None else log.device,
            capacity=None if log is None else log.capacity,
            memory=None if log is None else log.as_memory(),
        )

    def _repr_html_(self) -> str | None:
        return None if self.is_forecast else report.notebook(self.report())

    def __str__(self) -> str:
        what = f"{len(self.ops):,} ops in {self.seconds * 1e3:,.1f} ms"
        return show(self.events, f"rank {self.rank} of {self.ranks}, {what}")

    def __repr__(self) -> str:
        return f"<Trace of rank {self.rank}: {len(self.events)} events, {len(self.ops)} ops>"


_current: ContextValue[Trace | None] = ContextValue("shardwise.trace", None)


@contextmanager
def trace() -> Iterator[Trace]:
    """Within this context, note each collective: for which op and line, which bytes, how long, and who waited.

    Other ranks need not trace::

        >>> x = shardwise.shard(torch.ones(4, 4), 0)
        >>> with shardwise.trace() as t:
        ...     y = x.redistribute(1)
        >>> [event.kind for event in t.events if not event.is_meeting]  # print(t) is a table
        ['exchange']

    ``t.save("step.html")`` writes a page of it, and ``t.save(f"step-{t.rank}.json")`` a file for Perfetto. The time of
    a collective on a GPU is that until the host went on, which does not wait for the GPU. Where CUDA is in use, the
    memory of the current GPU is noted after each op; for that, torch's peak statistics are reset.
    """
    made = Trace()
    made.memory = MemoryLog.where_counted()
    with recording(made):
        made.note_memory()
        yield made
        made.note_memory()


@contextmanager
def recording(made: Trace) -> Iterator[Trace]:
    """Within this context, what is said to `begin`, `note` and `entered` goes into this trace."""
    global running
    handles = made._origins.watch_modules()
    running += 1
    try:
        with _current.set(made):
            yield made
    finally:
        running -= 1
        made.seconds = made.now()
        for handle in handles:
            handle.remove()


class Begun:
    """A collective under way."""

    def __init__(self, trace: Trace, said: dict[str, Any]) -> None:
        self._trace, self._said, self._origin = trace, said, trace._origins.here()
        self._begin, self._waited, self._waits = trace.now(), 0.0, 0.0

    def waits(self) -> None:
        """The host has nothing else to do from now on."""
        self._waits = self._trace.now()

    def end(self) -> None:
        """What was sent for is there."""
        now = self._trace.now()
        waited = now - self._waits if self._waits else 0.0
        self._trace.add(self._origin, begin=self._begin, seconds=now - self._begin, waited=waited, **self._said)


def current_trace() -> Trace | None:
    """The trace that is on here."""
    return _current.get() if running else None


def is_forecast() -> bool:
    """Whether somebody wants to know what would be sent, where nothing is."""
    trace = current_trace()
    return trace is not None and trace.is_forecast


def sets_up_forecast() -> bool:
    """Whether a step without data is being set up, of which nobody wants to know what is sent."""
    trace = current_trace()
    return trace is not None and trace.sets_up


def foresees_accelerator() -> bool:
    """Whether what is computed here, without data, stands for the same on an accelerator."""
    trace = current_trace()
    return trace is not None and trace.foreseen not in ("", "cpu")


def foresees_programs() -> bool:
    """Whether the mode that is on only notes what is computed, so that calls may be cached as without it."""
    trace = current_trace()
    return trace is not None and trace.foresees_programs


def foreseen_collectives() -> int:
    """How many collectives there would have been in this trace, if it tells what would be sent."""
    trace = current_trace()
    return trace.count() if trace is not None and trace.is_forecast else 0


def begin(kind: str, sent: float, received: float, **said: Any) -> Begun | None:
    """A collective begins, in which this rank sends and receives so many bytes; None if nobody traces."""
    trace = current_trace()
    return None if trace is None else trace.begin({"kind": kind, "sent": int(sent), "received": int(received), **said})


def as_buffer(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, of which a trace that is on learns that it is memory of a collective."""
    trace = current_trace()
    if trace is not None:
        trace.buffer(tensor)
    return tensor


@contextmanager
def waiting(kind: str, sent: float, received: float, **said: Any) -> Iterator[None]:
    """Around a collective for which the host waits."""
    begun = begin(kind, sent, received, **said) if running else None
    if begun is not None:
        begun.waits()
    yield
    if begun is not None:
        begun.end()


def with_trace(function: Callable[[], T]) -> Callable[[], T]:
    """The function, as if called here: in the trace that is on now, in whichever thread it is called."""
    trace = current_trace()
    if trace is None:
        return function

    def there() -> T:
        with _current.set(trace):
            return function()

    return there


def note_uncached(op: Any, reason: str) -> None:
    """A call runs no program: its steps are worked out anew. Asked for only while there is a trace."""
    trace = current_trace()
    if trace is not None:
        origin = trace._origins.here()
        with trace._lock:
            trace.uncached.append(UncachedCall(name_of(op), origin.place, origin.module, reason))


class Entered:
    """An op that is being computed."""

    def __init__(self, trace: Trace, op: Any) -> None:
        self._trace, self._begin, self._name = trace, trace.now(), name_of(op)
        self._origin, self._node = trace._origins.enter(op)

    def leave(self) -> None:
        """It is done, or has raised."""
        trace, origin = self._trace, self._origin
        trace._origins.leave(origin, self._node)
        seconds, thread = trace.now() - self._begin, threading.get_ident()
        with trace._lock:
            trace.ops.append(Op(self._name, origin.place, origin.module, self._begin, seconds, thread))
        trace.note_memory()


def enter(op: Any) -> Entered | None:
    """An op on sharded tensors begins; None if nobody traces."""
    trace = current_trace()
    return None if trace is None else Entered(trace, op)
