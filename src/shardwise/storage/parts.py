"""Files in parts: buffers put together for an upload, memory filled from answers, several at a time."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import TypeVar

T = TypeVar("T")

PART = 16 * 2**20  # bytes; the stores want 5 MiB at least
PARTS_OF_A_SIZE = 2000  # then they double, for S3 takes 10,000: a file may have 968 GiB


def parts_of(buffers: Iterable[memoryview]) -> Iterator[bytes]:
    """The bytes of buffers, which are asked for one by one, in parts of which only the last is small."""
    wanted, count = PART, 0
    # Copied once, for a buffer is used again when the next one is asked for. As bytes: aiohttp warns of a bytearray.
    part = io.BytesIO()
    for buffer in _flat(buffers):
        while part.tell() + buffer.nbytes >= wanted:
            room = wanted - part.tell()
            part.write(buffer[:room])
            buffer = buffer[room:]
            yield part.getvalue()
            part, count = io.BytesIO(), count + 1
            if count % PARTS_OF_A_SIZE == 0:
                wanted *= 2
        part.write(buffer)
    if part.tell():
        yield part.getvalue()


def pieces_of(begin: int, buffers: Sequence[memoryview]) -> Iterator[tuple[int, list[memoryview]]]:
    """Stretches of a file that are worth a request, and the memory that each goes into."""
    held: list[memoryview] = []
    size = 0
    for buffer in _flat(buffers):
        while size + buffer.nbytes > PART:
            cut = PART - size
            if cut:
                held.append(buffer[:cut])
                buffer = buffer[cut:]
            yield begin, held
            begin, held, size = begin + PART, [], 0
        if buffer.nbytes:
            held.append(buffer)
            size += buffer.nbytes
    if held:
        yield begin, held


class Target:
    """Memory that is filled from the front, with bytes as they come."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._left = deque(buffers)
        self.missing = sum(buffer.nbytes for buffer in buffers)

    def put(self, data: bytes | memoryview) -> None:
        """Fill the next bytes; no more may come than there is room for."""
        given = memoryview(data)
        self.missing -= given.nbytes
        while given.nbytes:
            head = self._left.popleft()
            count = min(head.nbytes, given.nbytes)
            head[:count] = given[:count]
            given = given[count:]
            if count < head.nbytes:
                self._left.appendleft(head[count:])


def side_by_side(jobs: Iterable[Callable[[Event], T]], width: int) -> list[T]:
    """Run jobs in threads, so many at a time, and give their results in order. They are asked for as threads get free.

    When one fails the others are told so by their event and waited for, so that none works on afterwards.
    """
    given_up = Event()
    running: deque[Future[T]] = deque()
    results: list[T] = []
    with ThreadPoolExecutor(width, thread_name_prefix="shardwise-storage") as pool:
        try:
            for job in jobs:
                if len(running) == width:
                    results.append(running.popleft().result())
                running.append(pool.submit(job, given_up))
            while running:
                results.append(running.popleft().result())
        except BaseException:
            given_up.set()
            for job_running in running:
                job_running.cancel()
            raise
    return results


def _flat(buffers: Iterable[memoryview]) -> Iterator[memoryview]:
    """Buffers as bytes, without empty ones."""
    for buffer in buffers:
        if buffer.nbytes:
            yield buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")
