"""Jobs that a test starts apart: each of its own processes, which it drives, kills, and moves to other hosts."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.patience import PATIENT, until

import shardwise
from shardwise.errors import ShardwiseError
from shardwise.state_transfer import StateTransfer
from shardwise.state_transfer.job_meeting import JobMeeting
from shardwise.state_transfer.job_wire import JobWire
from shardwise.testing.pool import _context

NAMES = ("embed", "mlp", "norm")
SIZES = {"embed": (96, 40), "mlp": (64, 80), "norm": (40,)}


def values(version: int) -> dict[str, torch.Tensor]:
    """The whole state of a version: no two elements of it are the same, nor of two versions."""
    found, begin = {}, 1_000_003.0 * version
    for name in NAMES:
        count = torch.Size(SIZES[name]).numel()
        found[name] = torch.arange(begin, begin + count, dtype=torch.float64).view(SIZES[name])
        begin += count
    return found


class Job:
    """Processes of one job, driven by calls of `Rank`'s methods on all of them."""

    def __init__(
        self,
        folder: Path,
        ranks: int,
        namespace: str | None = None,
        environment: dict[str, str] | None = None,
        backend: str = "gloo",
    ) -> None:
        context = _context(bare=False)
        store = str(folder / f"world-{time.monotonic_ns()}")
        self.connections: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(ranks):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, rank, ranks, store, namespace, environment or {}, backend), daemon=True
            )
            process.start()
            there.close()
            self.connections.append(here)
            self.processes.append(process)

    def begin(self, verb: str, *given: Any, **options: Any) -> Job:
        """Have all ranks call a method."""
        for connection in self.connections:
            connection.send((verb, given, options))
        return self

    def told(self) -> list[Any]:
        """What each gave, or the error."""
        answers = []
        for rank, connection in enumerate(self.connections):
            assert connection.poll(PATIENT), f"rank {rank} is silent"
            answers.append(connection.recv())
        return answers

    def call(self, verb: str, *given: Any, **options: Any) -> list[Any]:
        """Both; raises what a rank raises."""
        answers = self.begin(verb, *given, **options).told()
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def kill(self, *ranks: int) -> None:
        """At once, in the middle of whatever they do: these ranks, or all."""
        chosen = [self.processes[rank] for rank in ranks] or self.processes
        for process in chosen:
            process.kill()
        for process in chosen:
            process.join()


class Rank:
    """What a process of a job can be asked."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.state: dict[str, torch.Tensor] = {}
        self.transfer: StateTransfer | None = None
        self._exchange = JobWire.exchange

    def hold(self, dim: int | None, device: str = "cpu") -> None:
        """A state of zeros: whole, or cut along a dim over the ranks of this job."""
        for name, tensor in values(0).items():
            whole = torch.zeros_like(tensor, device=device)
            self.state[name] = whole if dim is None else shardwise.shard(whole, dim % whole.ndim)

    def without(self, name: str) -> None:
        """Take a tensor out of the state."""
        del self.state[name]

    def only_on(self, rank: int) -> None:
        """Have nothing, unless this is that rank."""
        if dist.get_rank() != rank:
            self.state.clear()

    def between(self, side: str, **options: Any) -> None:
        """Make the transfer."""
        self.transfer = StateTransfer.between(**{side: self.state}, **options)

    def fill(self, version: int) -> None:
        """Have the state be that of a version."""
        for name, mine in self.state.items():
            tensor = values(version)[name]
            mine.copy_(tensor if mine.__class__ is torch.Tensor else shardwise.shard(tensor, mine.sharding_spec()))

    def reach_store(self) -> None:
        """Connect with it, however long that takes."""
        assert self.transfer is not None
        assert self.transfer._other is not None
        client = self.transfer._other._renewed()
        until(lambda: not client.is_connecting)

    def wait_at_most(self, seconds: float) -> None:
        """For the other job and the store, from the next run on."""
        assert self.transfer is not None
        assert self.transfer._other is not None
        self.transfer._other._timeout = seconds

    def run(self, version: int | None = None) -> int:
        """Run; gives the version that it says."""
        assert self.transfer is not None
        self.transfer.run(version=version)
        return self.transfer.version

    def begin_run(self) -> None:
        """Run in the background."""
        assert self.transfer is not None
        self.handle = self.transfer.run(wait=False)

    def end_run(self) -> tuple[int | None, bool, int | None]:
        """Wait for it; gives which version the state was of when all had arrived, and which it is then."""
        assert self.transfer is not None
        until(self.handle.done)
        before = self.holds()
        self.handle.wait()
        return before, self.handle.done(), self.holds()

    def holds(self) -> int | None:
        """Of which version the state is, to the bit; None where it is of none, or of several."""
        mine = {n: (t if t.__class__ is torch.Tensor else t.full_tensor()).cpu() for n, t in self.state.items()}
        first = mine["embed"].flatten()[0].item()
        version = round(first / 1_000_003.0)
        same = values(version) if version else {name: torch.zeros(SIZES[name], dtype=torch.float64) for name in NAMES}
        return version if all(torch.equal(mine[name], same[name]) for name in mine) else None

    def poll(self) -> bool:
        """Whether the other job waits."""
        assert self.transfer is not None
        return self.transfer.poll()

    def _stand_still(self) -> None:
        """Say so, and do not go on before a word comes: for how many seconds to wait for others in this run, if any."""
        self._connection.send("stalled")
        seconds = self._connection.recv()
        if seconds is not None:
            assert self.transfer is not None
            assert self.transfer._other is not None
            meeting = self.transfer._other.meeting
            assert meeting is not None
            assert meeting._wire is not None
            meeting._timeout = meeting._wire._timeout = seconds
            for messages in meeting._wire._under_way:  # exchanges before this one, which nobody has waited for yet
                messages._timeout = seconds

    def stall(self, messages: int) -> None:
        """In the next run stand still, before the exchange of this number."""
        exchange, left = self._exchange, [messages]

        def stalled(wire: JobWire, *given: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                self._stand_still()
            return exchange(wire, *given)

        JobWire.exchange = stalled

    def stall_at(self, method: str) -> None:
        """In the next run stand still, on the first rank alone: before this method of its meeting."""
        if dist.get_rank():
            return
        real = getattr(JobMeeting, method)

        def stalled(meeting: JobMeeting) -> Any:
            setattr(JobMeeting, method, real)
            self._stand_still()
            return real(meeting)

        setattr(JobMeeting, method, stalled)

    def keep(self) -> None:
        """Copy what lies on this rank."""
        self.kept = self._local()

    def is_kept(self) -> bool:
        """Whether nothing has changed here since."""
        return all(torch.equal(one, other) for one, other in zip(self.kept, self._local(), strict=True))

    def _local(self) -> list[torch.Tensor]:
        sharded = [tensor for tensor in self.state.values() if isinstance(tensor, shardwise.ShardedTensor)]
        return [shard.tensor.clone() for tensor in sharded for shard in tensor.local_shards()]

    def rejoin(self, times: int) -> None:
        """Run and part, and be broken off in the middle by the target, again and again. Then wait until no more files
        are open than in the beginning, nor are there more threads: some end a little later."""
        assert self.transfer is not None
        other, found = self.transfer._other, []
        assert other is not None
        gc.collect()
        gc.disable()  # an error must not be in a cycle: its frames keep connections open
        for _ in range(times):
            self.run()
            other.part()  # as a failure does, after which nobody is waited for
            other.went_well()
            broken = self.broken_off if self.state["embed"].__class__ is torch.Tensor else self._exchange
            with mock.patch.object(JobWire, "exchange", broken), pytest.raises(ShardwiseError, match="broken off"):
                self.transfer.run()
            other.went_well()
            found.append(self._held())
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert [each for each in gc.garbage if isinstance(each, BaseException | FrameType)] == []
        most = [max(counts) for counts in zip(*found[: times // 3], strict=True)]
        until(lambda: all(now <= before for now, before in zip(self._held(), most, strict=True)))

    @staticmethod
    def _held() -> tuple[int, int]:
        """Open files and threads."""
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    @staticmethod
    def broken_off(wire: JobWire, *given: Any) -> Any:
        """Receive nothing."""
        raise ShardwiseError("broken off")


def _serve(
    connection: Connection,
    rank: int,
    ranks: int,
    store: str,
    namespace: str | None,
    environment: dict[str, str],
    backend: str,
) -> None:
    """The life of a process: it does what it is told to."""
    os.environ.update({name: value.format(rank=rank) for name, value in environment.items()})
    torch.set_num_threads(1)
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # a store asks for names of addresses, which may have none
    if namespace is not None:
        _enter(namespace)
    if ranks > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
        del os.environ["GLOO_SOCKET_IFNAME"]
    here = Rank(connection)
    while True:
        try:
            verb, given, options = connection.recv()
        except EOFError:
            os._exit(0)
        method: Callable[..., Any] = getattr(here, verb)
        try:
            connection.send(method(*given, **options))
        except Exception as error:
            connection.send(error)


def _enter(namespace: str) -> None:
    """Move this process, which has one thread, to another host: a namespace of the network."""
    assert threading.active_count() == 1
    with open(f"/var/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):
            raise OSError(ctypes.get_errno(), "setns")
