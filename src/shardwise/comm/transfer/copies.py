"""Many copies between views, found out once and made as often as one likes: on a GPU by few kernels for all of them,
and on the CPU, if asked for, in a thread that packs messages while those before them are sent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property
from importlib.util import find_spec
from queue import SimpleQueue

import torch

from shardwise.comm.transfer.views import copy, is_as_it_lies
from shardwise.comm.transfer.wire import Buffer

WORTH_A_THREAD = 2**20  # bytes
Pair = tuple[torch.Tensor, torch.Tensor]  # target and source, of one shape


class Copies:
    """Pairs of views, each copied into the other; their memory is kept as long as this is."""

    __slots__ = ("_launches", "_single", "nbytes")

    def __init__(self, pairs: Sequence[Pair], *, fused: bool = True) -> None:
        """Kernels that copy many pairs at once are found out about if ``fused``: it pays where all is copied often."""
        self.nbytes = sum(target.nbytes for target, _ in pairs)
        self._single: list[Pair] = []
        by_device: dict[torch.device, list[Pair]] = {}
        for target, source in pairs:
            together = fused and target.is_cuda and source.device == target.device and has_kernels()
            if together and is_as_it_lies(target, source):
                by_device.setdefault(target.device, []).append((target, source))
            else:
                self._single.append((target, source))
        self._launches: list[Callable[[], object]] = []
        for device, some in by_device.items():
            from shardwise.comm.transfer.copy_kernel import launches  # where there is Triton

            made, left = launches(device, some)
            self._launches += made
            self._single += left

    def make(self) -> None:
        """Copy all of them, as they are now."""
        for launch in self._launches:
            launch()
        for target, source in self._single:
            copy(target, source)


@cache
def has_kernels() -> bool:
    """Whether there is Triton, which comes with torch where there is CUDA, and works: it wants a C compiler, a folder
    to write to, and a GPU that is not too old. Asked once, by a copy; without it, views are copied one by one."""
    if find_spec("triton") is None:
        return False
    try:
        from shardwise.comm.transfer.copy_kernel import launches

        target, source = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
        for launch in launches(target.device, [(target, source)])[0]:
            launch()
        return bool(target.item())
    except Exception as error:  # of whatever kind: Triton's own, of the compiler, of the files
        logging.getLogger("shardwise").warning("views are copied one by one, for Triton fails: %s", error)
        return False


Packed = Sequence[tuple[Copies | None, Buffer]]  # messages, and what is copied into the memory of each


class Packer:
    """Packs messages, one set of them at a time.

    gloo writes to the wire in the thread that sends, as long as the wire takes it. A thread that packed, too, would
    keep the wire waiting.
    """

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "shardwise-packing")

    def packed(self, messages: Packed) -> Iterator[Buffer]:
        """Each message when it is packed."""
        copies = [copies for copies, _ in messages if copies is not None]
        if len(copies) < 2 or sum(each.nbytes for each in copies) < WORTH_A_THREAD:
            yield from _packed_here(messages)
        else:
            yield from self._packed_ahead(copies, messages)

    def _packed_ahead(self, copies: Sequence[Copies], messages: Packed) -> Iterator[Buffer]:
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        left = list(reversed(copies))
        try:
            work = self._threads.submit(_make_all, left, done, as_here())
        except RuntimeError:  # there are too many threads, or the process is about to end
            yield from _packed_here(messages)
            return
        try:
            for each, message in messages:
                error = done.get() if each is not None else None
                if error is not None:
                    raise error
                yield message
        finally:
            left.clear()  # if nobody asks for the rest: the memory is to be used again
            work.result()


def _make_all(
    left: list[Copies], done: SimpleQueue[BaseException | None], context: Callable[[], AbstractContextManager[object]]
) -> None:
    with torch.inference_mode(), context():  # as whoever sends
        while left:
            try:
                left.pop().make()
            except BaseException as error:  # whoever sends raises it
                left.clear()
                done.put(error)
            else:
                done.put(None)


def _packed_here(messages: Packed) -> Iterator[Buffer]:
    for copies, message in messages:
        if copies is not None:
            copies.make()
        yield message


def as_here() -> Callable[[], AbstractContextManager[object]]:
    """A context for another thread, in which the current device and stream are those of this one now: torch keeps them
    for each thread."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # so nothing is on a GPU
        return nullcontext
    stream = torch.cuda.current_stream()
    return lambda: torch.cuda.stream(stream)
