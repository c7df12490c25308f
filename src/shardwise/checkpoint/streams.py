"""The bytes of local tensors for a file, in buffers of whole blocks.

`stream_tensors` uses the tensors' own memory. `HostCopies` are copies, so that the tensors may change meanwhile.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.checkpoint.archive.blocks import BLOCK, Blocks
from shardwise.checkpoint.archive.memory import STAGING_BYTES, has_plain_bytes, tensor_buffer
from shardwise.comm.transfer.views import as_bytes, resolved, view_of
from shardwise.errors import CheckpointError

SMALL = BLOCK // 16  # bytes of a block that is joined with others
CHUNK = 16 * 2**20  # bytes of a chunk of copies

BlockBuffer = tuple[memoryview, list[int]]  # bytes, and the lengths of the blocks in them


def stream_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[BlockBuffer]:
    """The bytes of tensors. Each buffer is valid until the next one is requested."""
    small, used, lengths = bytearray(BLOCK), 0, list[int]()
    for tensor in tensors:
        for memory, block_lengths in _in_memory(tensor):
            begin = 0
            for length in block_lengths:
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


def _in_memory(tensor: torch.Tensor) -> Iterator[BlockBuffer]:
    """A tensor in CPU memory: its own memory, or copies of one part at a time."""
    if has_plain_bytes(tensor):
        yield tensor_buffer(tensor), _lengths(tensor)
        return
    for part in _parts(tensor):
        yield tensor_buffer(part.contiguous().cpu()), _lengths(part)


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor in parts of whole blocks."""
    for offsets, sizes in Blocks.of(tensor.shape, tensor.element_size()).parts(STAGING_BYTES // tensor.element_size()):
        yield resolved(view_of(tensor, offsets, sizes))


def _lengths(tensor: torch.Tensor) -> list[int]:
    return Blocks.of(tensor.shape, tensor.element_size()).nbytes(tensor.element_size())


# Copies -------------------------------------------------------------------------------------------------------------


@dataclass
class _Pool:
    """Chunks of host memory for reuse, pinned and pageable."""

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
    """Copies of tensors in host memory: one thread copies, another one writes.

    The copies never take more than ``max_bytes`` (at least two chunks): then `copy` waits until some are written. Until
    then, or until all copies are made, `buffers` waits, so that writing does not slow down the copying.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self._copied: queue.SimpleQueue[tuple[torch.Tensor, list[int], Any] | None] = queue.SimpleQueue()
        self._room = None if max_bytes is None else threading.Semaphore(max(max_bytes // CHUNK, 2))
        self._abandoned = threading.Event()
        self._failure: BaseException | None = None  # of `copy`
        self._full = threading.Event()  # set when all copies are made, or memory is used up
        self._chunk: torch.Tensor | None = None
        self._lengths: list[int] = []
        self._used = 0
        self._last: Any = None  # the CUDA event of the last copy
        self._stream: torch.cuda.Stream | None = None  # of the last copy

    def copy(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy tensors, which may change afterwards."""
        try:
            for tensor in tensors:
                if self._abandoned.is_set():  # the writer has failed, and has reported it
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
            self._copied.put(None)
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
        """Record the event of the last copy. Copies may come from several devices."""
        if self._last is not None and stream != self._stream:
            self._last.synchronize()  # an event covers one stream
        self._stream, self._last = stream, stream.record_event()

    def _take(self, *, pinned: bool) -> torch.Tensor:
        if self._room is not None and not self._room.acquire(blocking=False):
            self._full.set()
            while not self._room.acquire(timeout=0.1) and not self._abandoned.is_set():
                pass
        return _pool.take(pinned)

    def _ship(self) -> None:
        if self._chunk is not None:
            self._copied.put((self._chunk, self._lengths, self._last))
        self._chunk, self._lengths, self._used = None, [], 0

    def buffers(self) -> Iterator[BlockBuffer]:
        """The copies in order. Each buffer is valid until the next one is requested. Raises if copying failed."""
        self._full.wait()
        while (made := self._copied.get()) is not None:
            chunk, lengths, event = made
            if event is not None:
                event.synchronize()
            memory, begin = tensor_buffer(chunk), 0
            for total, together in _batch_lengths(lengths):
                yield memory[begin : begin + total], together
                begin += total
            self._recycle(chunk)
        if self._failure is not None:
            raise CheckpointError(f"the tensors could not be copied: {self._failure}") from self._failure

    def abandon(self) -> None:
        """Drop all copies: nobody will write them."""
        self._abandoned.set()
        while not self._copied.empty():
            made = self._copied.get()
            if made is not None:
                self._recycle(made[0])

    def _recycle(self, chunk: torch.Tensor) -> None:
        _pool.give(chunk)
        if self._room is not None:
            self._room.release()


def _batch_lengths(lengths: list[int]) -> Iterator[tuple[int, list[int]]]:
    """The lengths in lists that sum up to about a block, each with its sum."""
    total, found = 0, list[int]()
    for length in lengths:
        if found and total + length > BLOCK:
            yield total, found
            total, found = 0, []
        found.append(length)
        total += length
    if found:
        yield total, found
