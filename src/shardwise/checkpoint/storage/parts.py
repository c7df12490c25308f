"""Files in parts: parts of an upload, ranges of a download, and running several requests at a time."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import TypeVar

T = TypeVar("T")

PART = 16 * 2**20  # bytes; stores require at least 5 MiB
PARTS_OF_A_SIZE = 2000  # then the size doubles: S3 takes 10,000 parts, so a file may have 968 GiB


def upload_parts(buffers: Iterable[memoryview]) -> Iterator[bytes]:
    """The bytes of buffers, in parts of which only the last is small. Buffers are consumed one by one."""
    wanted, count = PART, 0
    # Copied, for a buffer is only valid until the next one. As bytes: aiohttp warns about a bytearray.
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


def request_ranges(begin: int, buffers: Sequence[memoryview]) -> Iterator[tuple[int, list[memoryview]]]:
    """Ranges of a file for one request each: the first byte, and the memory to fill."""
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


class BufferSequence:
    """Memory in several buffers, filled from the front."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._left = deque(buffers)
        self.missing = sum(buffer.nbytes for buffer in buffers)

    def put(self, data: bytes | memoryview) -> None:
        """Fill the next bytes. ``data`` must fit."""
        given = memoryview(data)
        self.missing -= given.nbytes
        while given.nbytes:
            head = self._left.popleft()
            count = min(head.nbytes, given.nbytes)
            head[:count] = given[:count]
            given = given[count:]
            if count < head.nbytes:
                self._left.appendleft(head[count:])


def run_concurrently(jobs: Iterable[Callable[[Event], T]], width: int) -> list[T]:
    """Run jobs in ``width`` threads and give their results in order. Jobs are generated as threads become free.

    When a job fails, the event of the others is set, and they are waited for.
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
