"""`Pool`: ranks on this machine that run tasks.

The processes are forked from a server that has torch loaded, rendezvous through a file, and wait for tasks. A task that
fails or hangs ends its pool: the error has the failing rank's traceback, or every rank's stack, and the next task gets
new processes. The processes of a bare pool are not forked, and import everything themselves.
"""

from __future__ import annotations

import atexit
import codecs
import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from shardwise.testing.task import Task
from shardwise.testing.worker import Outcome, serve

# Torch imports its tracer for some plain ops, which takes seconds: once for all ranks, not once for each.
PRELOADED = ["torch", "torch.distributed", "shardwise", "shardwise.testing.worker", "torch._dynamo"]
# Slow imports that ranks probably need if the parent process has them.
PRELOADED_IF_HERE = ["pytest", "_pytest.assertion.rewrite", "hypothesis", "transformers", "accelerate", "peft"]
TIMEOUT = 300.0  # seconds after which a task counts as hung, also on a busy machine
START_TIMEOUT = 300.0  # seconds for the start of the ranks
ENDING = 30.0  # seconds for a process to end, or to write its stack
GRACE = 6.0  # seconds for the other ranks to fail after the first one
MACHINERY = ("/multiprocessing/", "/shardwise/testing/", "<string>", "Extension modules")  # frames of every stack
OUTERMOST = ('"<string>", line 1 in <module>\n', "  ...\n")  # the end of the main thread's stack, which is last
BEFORE_JOINING = "a script that starts ranks must do so under `if __name__ == '__main__':`"
MOST_POOLS = 4  # kept alive, of different kinds


class RankFailure(AssertionError):
    """A rank raised, died or hung; the message has the rank, its traceback or stack, and its output."""


class Pool:
    """Ranks that run tasks together. Use `run_on_ranks` or `shardwise.testing.ranks`, which share pools."""

    def __init__(self, world_size: int, backend: str = "gloo", *, bare: bool = False) -> None:
        if world_size < 1:
            raise ValueError(f"a pool needs at least one rank, not {world_size}")
        if "nccl" in backend and not torch.cuda.is_available():
            raise ValueError("ranks of the backend nccl need a GPU, and torch finds none")
        self.world_size = world_size
        self.folder = tempfile.TemporaryDirectory(prefix="shardwise-ranks-")
        context = _context(bare)
        self.connections: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank in range(world_size):
            here, there = context.Pipe()
            process = context.Process(
                target=serve,
                args=(there, rank, world_size, self.folder.name, backend),
                name=f"rank {rank}",
                daemon=True,
            )
            process.start()
            there.close()
            self.connections.append(here)
            self.processes.append(process)
        self._joined = False
        self._collect(START_TIMEOUT)  # until every rank has joined the group
        self._joined = True

    @property
    def alive(self) -> bool:
        """Whether the pool can take a task."""
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    def run(self, task: Task, timeout: float, *, echo: bool = False) -> list[Any]:
        """Run a task on every rank; give what each returned, by rank, or raise a `RankFailure`."""
        __tracebackhide__ = True
        output = _OutputFollower(self._file(0, "output")) if echo else None
        try:
            for connection in self.connections:
                connection.send(task)
            return self._collect(timeout, output)
        except unittest.SkipTest:
            raise
        except BaseException:
            self.close(at_once=True)  # late results would be taken for those of the next task
            raise

    def _collect(self, timeout: float, output: _OutputFollower | None = None) -> list[Any]:
        __tracebackhide__ = True
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < self.world_size:
            waiting = {self.connections[r]: r for r in range(self.world_size) if r not in outcomes}
            left = max(deadline - time.monotonic(), 0)
            ready = wait(list(waiting), left if output is None else min(left, _OutputFollower.EVERY))
            if output is not None:
                output.print_new()
            if not ready and time.monotonic() >= deadline:
                break
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index] # only connections are waited for
                outcomes[rank] = self._receive(rank)
                if outcomes[rank].failure is not None:
                    deadline = min(deadline, time.monotonic() + GRACE)
        if len(outcomes) == self.world_size and all(outcome.failure is None for outcome in outcomes.values()):
            if any(outcome.spent for outcome in outcomes.values()):
                self.close(at_once=True)
            skipped = [outcome.skipped for outcome in outcomes.values() if outcome.skipped is not None]
            if skipped:
                raise unittest.SkipTest(skipped[0])
            return [outcomes[rank].value for rank in range(self.world_size)]
        report = self._report(outcomes, timeout)
        self.close(at_once=True)
        raise RankFailure(report)

    def _receive(self, rank: int) -> Outcome:
        try:
            outcome: Outcome = self.connections[rank].recv()
        except (EOFError, ConnectionError):
            process = self.processes[rank]
            process.join(ENDING)
            hint = "" if self._joined else f"; {BEFORE_JOINING}"
            stack = self._written_stack(rank)
            words = f"; it was here:\n{stack}" if stack else f", without a word{hint}\n"
            return Outcome(None, f"the process ended with exit code {process.exitcode}{words}")
        return outcome

    def _report(self, outcomes: dict[int, Outcome], timeout: float) -> str:
        """The failures of all ranks; identical ones once."""
        parts: list[str] = []
        failures: dict[str, list[int]] = {}
        for rank, outcome in sorted(outcomes.items()):
            if outcome.failure is not None:
                failures.setdefault(outcome.failure, []).append(rank)
        for failure, failed in failures.items():
            who = " and ".join(f"rank {rank}" for rank in failed)
            parts.append(f"{who} of {self.world_size} failed:\n{failure}{self._printed(failed[0])}")
        for rank in range(self.world_size):
            if rank not in outcomes:
                why = f"did not finish within {timeout:g} s" if not failures else "was still running after that"
                parts.append(f"rank {rank} of {self.world_size} {why}; it is here:\n{self._stack(rank)}")
        return "\n".join(parts)

    def _printed(self, rank: int) -> str:
        file = self._file(rank, "output")
        text = file.read_text(errors="replace").strip() if file.exists() else ""
        return f"\nwhat rank {rank} printed:\n{text[-4000:]}\n" if text else ""

    def _stack(self, rank: int) -> str:
        """The stack of a hung rank, from its fault handler."""
        process, file = self.processes[rank], self._file(rank, "stack")
        if process.pid is not None and process.is_alive() and file.exists():
            os.kill(process.pid, signal.SIGUSR1)
            end = time.monotonic() + ENDING
            while not file.read_text(errors="replace").endswith(OUTERMOST) and time.monotonic() < end:
                time.sleep(0.01)
        return self._written_stack(rank) or "(it gave no stack)\n"

    def _written_stack(self, rank: int) -> str:
        """The stack that a rank's fault handler has written."""
        file = self._file(rank, "stack")
        lines = file.read_text(errors="replace").splitlines(keepends=True) if file.exists() else []
        own = [line for line in lines if not any(name in line for name in MACHINERY)]
        return "".join(own)

    def _file(self, rank: int, kind: str) -> Path:
        return Path(self.folder.name) / f"{kind}-{rank}"

    def close(self, *, at_once: bool = False) -> None:
        """End the ranks: let them exit by themselves for up to ENDING seconds; with ``at_once``, kill them now."""
        for connection in self.connections:
            connection.close()  # at which a rank that waits for a task ends
        end = time.monotonic() + (0 if at_once else ENDING)
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
            process.kill()
        for process in self.processes:
            process.join()
        self.connections, self.processes = [], []
        with contextlib.suppress(OSError):
            self.folder.cleanup()


def _context(bare: bool) -> ForkServerContext | SpawnContext:
    """How processes are started: forked from the server, or spawned."""
    if bare:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED + [name for name in PRELOADED_IF_HERE if name in sys.modules])
    return context


class _OutputFollower:
    """Prints the output of a rank as it is written, in whole characters."""

    EVERY = 0.1  # seconds

    def __init__(self, file: Path) -> None:
        os.truncate(file, 0)  # drop the output of earlier tasks
        self._file, self._position = file, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def print_new(self) -> None:
        """Print what the rank has written since."""
        with open(self._file, "rb") as file:
            file.seek(self._position)
            new = file.read()
        self._position += len(new)
        print(self._decoder.decode(new), end="", flush=True)


_pools: dict[tuple[int, str, bool], Pool] = {}


def run_on_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = TIMEOUT,
    fresh: bool = False,
    bare: bool = False,
    echo: bool = False,
    backend: str = "gloo",
    **kwargs: Any,
) -> list[Any]:
    """Call a module-level function on ``world_size`` ranks; give what each returned, by rank.

    The ranks' default group is of this backend of torch.distributed. With ``nccl``, each rank's current device is a GPU
    of its own while there are enough of them; else ranks share them, talking as if they were on different hosts.

    With ``fresh``, the ranks are new and end afterwards: for what cannot be undone in a process, such as RPC. With
    ``bare``, they started without torch's tracer and all that comes with it, which other ranks have from the
    beginning: for what must come before such imports, as `dropin.install` must. With ``echo``, what rank 0 prints is
    printed here as it comes; else it is part of the error if the function fails.

    >>> from shardwise.testing import run_on_ranks
    >>> import torch.distributed
    >>> run_on_ranks(2, torch.distributed.get_rank)
    [0, 1]
    """
    __tracebackhide__ = True
    task = Task.of(function, args, kwargs)
    if fresh:
        with contextlib.closing(Pool(world_size, backend, bare=bare)) as pool:
            return pool.run(task, timeout, echo=echo)
    pool = _shared(world_size, backend, bare)
    return pool.run(task, timeout, echo=echo)


def _shared(world_size: int, backend: str, bare: bool) -> Pool:
    """The living pool of this kind, or a new one; the least recently used pool is closed if there are many."""
    pool = _pools.pop((world_size, backend, bare), None)
    if pool is None or not pool.alive:
        while len(_pools) >= MOST_POOLS:
            _pools.pop(next(iter(_pools))).close()
        pool = Pool(world_size, backend, bare=bare)
    _pools[world_size, backend, bare] = pool  # most recently used
    return pool


@atexit.register
def _close_all() -> None:
    for pool in _pools.values():
        pool.close()
    _pools.clear()
