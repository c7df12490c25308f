"""`Stopwatch`: how many seconds a call takes, on this rank's device, on its host, and on all ranks together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from shardwise.torch_private import gpu_sleep

Call = Callable[[], object]

LONG_ENOUGH = 2e-2  # seconds: shorter calls are repeated to fill it
MOST_CALLS = {"cpu": 1000, "cuda": 20}  # in one stretch; on a GPU, so few that the host runs ahead of it
SAME_CLOCK = 1.0  # seconds: ranks whose clocks differ more are on different machines
SLEEP = 4_000_000  # cycles that the GPU waits, some milliseconds, while the host queues calls


class Stopwatch:
    """Times calls on a device: a stretch of several calls, several times, and what is typical of those."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self._repeats = device, repeats
        self._is_gpu = device.type == "cuda"
        self._meeting = 0.0  # seconds until all ranks have come together, when all are there
        meetings = [self._together(lambda: None, 0) for _ in range(3 * repeats)]
        self._meeting = statistics.median(self.slowest(meetings))
        self._begin = 0.0  # seconds of the CPU to begin a call
        if not self._is_gpu:
            nothing = torch.ones(1)
            self._begin = self.on_all_ranks(lambda: nothing.mul(nothing))

    def on_device(self, call: Call) -> float:
        """Seconds of the device for one call, without those of the host. On the CPU, all ranks call it."""
        if not self._is_gpu:
            seconds = statistics.fmean(self._by_rank(call))
            return max(seconds - self._begin, seconds / 2)
        call()
        calls = self._calls(self._stretch(call, 1))
        return statistics.median(self._stretch(call, calls) / calls for _ in range(self._repeats))

    def on_host(self, call: Call) -> float:
        """Seconds that the host needs to begin one call. On the CPU, all ranks call it."""
        if not self._is_gpu:
            return statistics.fmean(self._by_rank(call))
        call()
        self._wait()
        calls, found = MOST_CALLS["cpu"] // 4, []
        for _ in range(self._repeats):
            begun = time.perf_counter()
            for _ in range(calls):
                call()
            found.append((time.perf_counter() - begun) / calls)
            self._wait()
        return statistics.median(found)

    def on_all_ranks(self, call: Call) -> float:
        """Seconds of one call that all ranks make together, until the last of them is done. All ranks call it."""
        calls = self._enough_calls(call)
        return statistics.fmean(self.slowest([self._together(call, calls) / calls for _ in range(self._repeats)]))

    def _enough_calls(self, call: Call) -> int:
        """How many take long enough to be timed, the same number on every rank."""
        call()
        calls, enough = 1, max(LONG_ENOUGH, 10 * self._meeting)
        while (once := self.slowest([self._together(call, calls)])[0]) < enough and calls < MOST_CALLS["cpu"]:
            calls = min(MOST_CALLS["cpu"], int(calls * max(2.0, min(enough / once, 10.0))))
        return calls

    def _by_rank(self, call: Call) -> list[float]:
        """Seconds of one call on this rank, several times: from when the first rank begins until this one is done.

        For ranks that share cores may have one at once, or later. All ranks call it.
        """
        calls, found = self._enough_calls(call), []
        for _ in range(self._repeats):
            self.slowest([0.0])
            begun = time.perf_counter()
            for _ in range(calls):
                call()
            end, first = time.perf_counter(), -self.slowest([-begun])[0]
            found.append((end - (first if 0 <= begun - first < SAME_CLOCK else begun)) / calls)
        return found

    def slowest(self, seconds: list[float]) -> list[float]:
        """The most that any rank has, one by one. All ranks call it, and go on together."""
        found = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return [float(one) for one in found.tolist()]

    def _stretch(self, call: Call, calls: int) -> float:
        """Seconds of the device for some calls, all of which are queued before the first one begins.

        While the host queues them, the device waits, and computes nothing: other ranks may share it.
        """
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call] # torch's
        gpu_sleep(SLEEP)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def _together(self, call: Call, calls: int) -> float:
        """Seconds from when all ranks have come together until the last one has made its calls."""
        self.slowest([0.0])
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        self._wait()
        self.slowest([0.0])
        return max(time.perf_counter() - begun - self._meeting, 1e-9)

    def _calls(self, once: float) -> int:
        return max(1, min(MOST_CALLS[self.device.type], int(LONG_ENOUGH / max(once, 1e-9))))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
