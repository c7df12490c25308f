"""`Stopwatch`: how many seconds a call takes, on this rank's device, on its host, and on all ranks together."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

Call = Callable[[], object]

LONG_ENOUGH = 3e-2  # seconds: shorter calls are repeated to fill it, so that ranks that share a core take turns
MOST_CALLS = {"cpu": 1000, "cuda": 20}  # in one stretch; on a GPU, so few that the host runs ahead of it
BUSY, BUSY_FOR = 4096, 2  # the size and the number of products that keep the GPU busy while the host queues calls


class Stopwatch:
    """Times calls on a device: a stretch of several calls, several times, and what is typical of those."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self._repeats = device, repeats
        self._busy = torch.ones(BUSY, BUSY, device=device) if device.type == "cuda" else None

    def on_device(self, call: Call) -> float:
        """Seconds of the device for one call. The host's are not in it, unless the device is the CPU."""
        call()
        calls = self._calls(self._stretch(call, 1))
        return self._typical([self._stretch(call, calls) / calls for _ in range(self._repeats)])

    def on_host(self, call: Call) -> float:
        """Seconds that the host needs to begin one call."""
        call()
        self._wait()
        calls, found = MOST_CALLS["cpu"] // 4, []
        for _ in range(self._repeats):
            begun = time.perf_counter()
            for _ in range(calls):
                call()
            found.append((time.perf_counter() - begun) / calls)
            self._wait()
        return self._typical(found)

    def on_all_ranks(self, call: Call) -> float:
        """Seconds of one call that all ranks make together, until the last of them is done. All ranks call it."""
        call()
        calls = self._calls(self.slowest([self._together(call, 1)])[0])
        return statistics.median(self.slowest([self._together(call, calls) / calls for _ in range(self._repeats)]))

    def slowest(self, seconds: list[float]) -> list[float]:
        """The most that any rank has, one by one. All ranks call it, and go on together."""
        found = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return [float(one) for one in found.tolist()]

    def _typical(self, seconds: list[float]) -> float:
        """The median; of ranks that share cores the mean, for each has a core at one time and none at another."""
        return statistics.fmean(seconds) if self.device.type == "cpu" else statistics.median(seconds)

    def _stretch(self, call: Call, calls: int) -> float:
        if self._busy is None:
            begun = time.perf_counter()
            for _ in range(calls):
                call()
            return time.perf_counter() - begun
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call] # torch's
        for _ in range(BUSY_FOR):
            torch.mm(self._busy, self._busy)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def _together(self, call: Call, calls: int) -> float:
        self.slowest([0.0])  # all ranks begin together
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        self._wait()
        return time.perf_counter() - begun

    def _calls(self, once: float) -> int:
        return max(1, min(MOST_CALLS[self.device.type], int(LONG_ENOUGH / max(once, 1e-9))))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
