"""Packing ahead: a thread packs messages while those before them are sent.

gloo writes to the wire in the thread that sends, as long as the wire takes it. A thread that packed, too, would keep
the wire waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from queue import SimpleQueue

import torch

from shardwise.state_transfer.threads import as_here
from shardwise.state_transfer.wires import Message
from shardwise.transfer.copies import Copies

WORTH_A_THREAD = 2**20  # bytes
Packed = Sequence[tuple[Copies | None, Message]]  # messages, and what is copied into the memory of each


class Packer:
    """Packs messages, one set of them at a time."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, "shardwise-packing")  # it has none before there is work

    def packed(self, messages: Packed) -> Iterator[Message]:
        """Each message when it is packed."""
        copies = [copies for copies, _ in messages if copies is not None]
        if len(copies) < 2 or sum(each.nbytes for each in copies) < WORTH_A_THREAD:
            yield from _here(messages)
        else:
            yield from self._ahead(copies, messages)

    def _ahead(self, copies: Sequence[Copies], messages: Packed) -> Iterator[Message]:
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        left = list(reversed(copies))
        try:
            work = self._threads.submit(_make_all, left, done, as_here())
        except RuntimeError:  # there are too many threads, or the process is about to end
            yield from _here(messages)
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


def _here(messages: Packed) -> Iterator[Message]:
    for copies, message in messages:
        if copies is not None:
            copies.make()
        yield message
