"""`MemoryLog`: the memory of a GPU while a trace is on, as torch's allocator counts it."""

from __future__ import annotations

import torch

from shardwise.comm.tracing.chrome import MEMORY
from shardwise.report import Memory


class MemoryLog:
    """What tensors of this process take on its current GPU, at the end of each op and at the peaks in between.

    The allocator knows the highest peak since its statistics were reset, which making a log does.
    """

    def __init__(self) -> None:
        self._device = torch.cuda.current_device()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._times: list[float] = []
        self._bytes: list[int] = []
        self.peak, self.peak_time = 0, 0.0

    @staticmethod
    def where_counted() -> MemoryLog | None:
        """A log, where something counts: None without CUDA, or before its first use."""
        is_used = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # torch's
        return MemoryLog() if is_used else None

    @property
    def device(self) -> str:
        """The name of the GPU."""
        return torch.cuda.get_device_name(self._device)

    @property
    def capacity(self) -> int:
        """All bytes that the GPU has."""
        return int(torch.cuda.get_device_properties(self._device).total_memory)

    def note(self, now: float) -> None:
        """What is there now. A higher peak than before was somewhere since the last note: it is put in the middle."""
        counted = torch.cuda.memory.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]
        if counted["peak"] > max(self.peak, counted["current"]):
            before = self._times[-1] if self._times else 0.0
            self._add((before + now) / 2, counted["peak"])
        self._add(now, counted["current"])

    def _add(self, time: float, size: int) -> None:
        if size > self.peak:
            self.peak, self.peak_time = size, time
        self._times.append(time)
        self._bytes.append(size)

    def as_memory(self) -> Memory:
        """For a report: one series, for the allocator does not know what its memory is for."""
        return Memory(self._times, {MEMORY: self._bytes}, self.peak, self.peak_time, ())
