"""The bytes of local tensors as they are written: in stretches of whole blocks, each of about a block.

Either straight from the tensors' memory, or from copies in host memory, so that the tensors may change meanwhile.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.archive.blocks import BLOCK, Blocks
from shardwise.archive.memory import STAGED, buffer_of, lies_plain
from shardwise.errors import CheckpointError
from shardwise.transfer.views import as_bytes, resolved, view_of

SMALL = BLOCK // 16  # bytes of a block that is written together with others
CHUNK = 16 * 2**20  # bytes of the copies that are made and written at a time

Stretch = tuple[memoryview, list[int]]  # bytes, and the lengths of the blocks that they are


def lying(tensors: Iterable[torch.Tensor]) -> Iterator[Stretch]:
    """Tensors as they lie; a stretch is done with when the next one is asked for."""
    small, used, lengths = bytearray(BLOCK), 0, list[int]()
    for tensor in tensors:
        for memory, of_blocks in _in_memory(tensor):
            begin = 0
            for length in of_blocks:
                block, begin = memory[begin : begin + length], begin + length
                if lengths and (length > SMALL or used + length > BLOCK):
                    yield memoryview(small)[:used], lengths
                    used, lengths = 0, []
                if length > SMALL:
                    yield block, [length]
                else:
                    small[used : used + length] = block
                    lengths.append(length)
                    used += length
    if lengths:
        yield memoryview(small)[:used], lengths


def _in_memory(tensor: torch.Tensor) -> Iterator[Stretch]:
    """A tensor in the memory of the CPU: as it lies, or copies of a part at a time."""
    if lies_plain(tensor):
        yield buffer_of(tensor), _lengths(tensor)
        return
    for part in _parts(tensor):
        yield buffer_of(part.contiguous().cpu()), _lengths(part)


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor in parts of whole blocks."""
    for offsets, sizes in Blocks.of(tensor.shape, tensor.element_size()).parts(STAGED // tensor.element_size()):
        yield resolved(view_of(tensor, offsets, sizes))


def _lengths(tensor: torch.Tensor) -> list[int]:
    return Blocks.of(tensor.shape, tensor.element_size()).nbytes(tensor.element_size())


# Copies -------------------------------------------------------------------------------------------------------------


@dataclass
class _Pool:
    """Chunks of host memory that are used again, pinned ones and others."""

    free: dict[bool, list[torch.Tensor]] = field(default_factory=lambda: {True: [], False: []})
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, pinned: bool) -> torch.Tensor:
        with self.lock:
            if self.free[pinned]:
                return self.free[pinned].pop()
        return torch.empty(CHUNK, dtype=torch.uint8, pin_memory=pinned)

    def give(self, chunk: torch.Tensor) -> None:
        with self.lock:
            self.free[chunk.is_pinned() if torch.cuda.is_available() else False].append(chunk)


_pool = _Pool()


class HostCopies:
    """Copies of tensors on their way to a file: one thread makes them, another reads their stretches.

    They never take more than ``max_bytes`` (at least two chunks): to make more, one waits until some are written.
    Until then, or until all are made, nothing is written, which would only slow down the one who waits for the copies.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self._made: queue.SimpleQueue[tuple[torch.Tensor, list[int], Any] | None] = queue.SimpleQueue()
        self._room = None if max_bytes is None else threading.Semaphore(max(max_bytes // CHUNK, 2))
        self._given_up = threading.Event()
        self._failure: BaseException | None = None  # of the one who copies
        self._full = threading.Event()  # whether all are made, or no more can be before some are written
        self._chunk: torch.Tensor | None = None
        self._lengths: list[int] = []
        self._used = 0
        self._last: Any = None  # the event after which the last copy is made
        self._stream: torch.cuda.Stream | None = None  # that of the last copy

    def make(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy these; when it returns they may change."""
        try:
            for tensor in tensors:
                if self._given_up.is_set():  # nobody writes any more, and why is told elsewhere
                    return
                plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())
                for part in [tensor] if plain else _parts(tensor):
                    self._copy(as_bytes(part.contiguous()), _lengths(part))
            self._ship()
            if self._last is not None:
                self._last.synchronize()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._made.put(None)
            self._full.set()

    def _copy(self, flat: torch.Tensor, lengths: list[int]) -> None:
        begin, first = 0, 0
        while first < len(lengths):
            if self._chunk is None or self._used + lengths[first] > CHUNK:
                self._ship()
                self._chunk = self._take(pinned=flat.is_cuda)
            end, total = first, 0
            while end < len(lengths) and self._used + total + lengths[end] <= CHUNK:
                total += lengths[end]
                end += 1
            self._chunk[self._used : self._used + total].copy_(flat[begin : begin + total], non_blocking=flat.is_cuda)
            if flat.is_cuda:
                self._record(torch.cuda.current_stream(flat.device))
            self._lengths += lengths[first:end]
            self._used, begin, first = self._used + total, begin + total, end

    def _record(self, stream: torch.cuda.Stream) -> None:
        """Note when the last copy is made. Its device need not be the current one, nor that of the copy before."""
        if self._last is not None and stream != self._stream:
            self._last.synchronize()  # an event tells of one stream
        self._stream, self._last = stream, stream.record_event()

    def _take(self, *, pinned: bool) -> torch.Tensor:
        if self._room is not None and not self._room.acquire(blocking=False):
            self._full.set()
            while not self._room.acquire(timeout=0.1) and not self._given_up.is_set():
                pass
        return _pool.take(pinned)

    def _ship(self) -> None:
        if self._chunk is not None:
            self._made.put((self._chunk, self._lengths, self._last))
        self._chunk, self._lengths, self._used = None, [], 0

    def stretches(self) -> Iterator[Stretch]:
        """The copies, as they are made; each is used again when the next one is asked for. Raises if not all were."""
        self._full.wait()
        while (made := self._made.get()) is not None:
            chunk, lengths, event = made
            if event is not None:
                event.synchronize()
            memory, begin = buffer_of(chunk), 0
            for total, together in _joined(lengths):
                yield memory[begin : begin + total], together
                begin += total
            self._done(chunk)
        if self._failure is not None:
            raise CheckpointError(f"the tensors could not be copied: {self._failure}") from self._failure

    def give_up(self) -> None:
        """Nobody reads the copies any more."""
        self._given_up.set()
        while not self._made.empty():
            made = self._made.get()
            if made is not None:
                self._done(made[0])

    def _done(self, chunk: torch.Tensor) -> None:
        _pool.give(chunk)
        if self._room is not None:
            self._room.release()


def _joined(lengths: list[int]) -> Iterator[tuple[int, list[int]]]:
    """Lengths of blocks in lists of about a block together, each with its sum."""
    total, found = 0, list[int]()
    for length in lengths:
        if found and total + length > BLOCK:
            yield total, found
            total, found = 0, []
        found.append(length)
        total += length
    if found:
        yield total, found
