"""Threads that wait for the messages of one group.

gloo breaks the connection when a wait has a time limit that passes. So a thread waits without a limit, and the rank
waits for the thread. A rank that gives up leaves its messages to the thread.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch

FOREVER = timedelta(days=365)
AT_EXIT = 10.0  # seconds that threads get to come back before Python ends; they take long on a busy machine only
MOST_FREE = 2  # threads of a group that wait for work; others end when their messages have come
UNUSED_TAG = 1  # of a message that nobody sends

Works = list[tuple[Any, int, torch.Tensor]]  # with the other end, and memory that must live until the work is done


class PendingMessages:
    """Messages that a thread waits for, and the messages after them."""

    def __init__(self, gloo: Any, works: Works, following: Callable[[], Works] | None = None) -> None:
        self.gloo, self.works, self._following = gloo, works, following
        self._done = 0
        self.error: Exception | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def peers(self) -> list[int]:
        """The ranks that are waited for, by their numbers in the group."""
        return [peer for _, peer, _ in self.works[self._done :]]

    def run(self) -> None:
        """Wait for all of them."""
        try:
            while self.works:
                for work, _, _ in self.works:
                    work.wait(FOREVER)
                    self._done += 1
                if self._following is None:
                    return
                self.works, self._done = self._following(), 0
        except Exception as error:  # whoever waits raises it
            self.error = error

    def drop(self) -> None:
        """Begin no further messages, and end the waits: gloo breaks a connection when a wait's time limit passes."""
        self._following = None
        for peer in self.peers():
            with suppress(RuntimeError, ValueError):
                self.gloo.recv([torch.empty(1, dtype=torch.uint8)], peer, UNUSED_TAG).wait(timedelta(milliseconds=1))


class MessageThreads:
    """One thread is always free, so that the garbage collector can hand messages over at any moment.

    The garbage collector must not start threads itself, which takes locks.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """There are no threads, as in a forked child."""
        self._queue: queue.SimpleQueue[PendingMessages | None] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._threads = self._free = 0
        self._is_ended = False
        self.pending: set[PendingMessages] = set()
        _all.add(self)

    def start(self) -> None:
        """Have a free thread, before messages are handed over."""
        if not self._free:
            with self._lock:
                if not self._free and not self._is_ended:
                    threading.Thread(target=self._run, name="shardwise-messages", daemon=True).start()
                    self._threads += 1
                    self._free += 1

    def wait_for(self, messages: PendingMessages) -> None:
        """Have a thread wait for messages. The garbage collector may call it, if a thread was started."""
        with self._lock:  # of one thread as often as it likes: the garbage collector may come at any moment
            if not self._is_ended:
                self.pending.add(messages)
                self._queue.put(messages)
                return
        messages.error = RuntimeError("the process group was destroyed")
        messages.drop()
        messages.done.release()

    def _run(self) -> None:
        while (messages := self._queue.get()) is not None:
            with self._lock:
                self._free -= 1
                with suppress(RuntimeError):  # there are too many threads, or Python ends
                    self.start()
            messages.run()
            self.pending.discard(messages)
            done = messages.done
            del messages  # whoever waits may count on the memory being free then
            with self._lock:
                is_spare = self._free >= MOST_FREE
                if is_spare:
                    self._threads -= 1
                else:
                    self._free += 1
            done.release()
            if is_spare:
                return

    def end(self) -> None:
        """Drop pending messages, and stop the threads."""
        with self._lock:
            self._is_ended = True
        for messages in self.pending.copy():
            messages.drop()
        for _ in range(self._threads):
            self._queue.put(None)


_all: WeakSet[MessageThreads] = WeakSet()  # also those that have been ended, while their threads run


def drop(pending: Iterable[PendingMessages]) -> None:
    """Drop messages before Python ends: a thread that comes back later would abort the process."""
    dropped = tuple(pending)
    for messages in dropped:
        messages.drop()
    end = time.monotonic() + AT_EXIT
    for messages in dropped:
        messages.done.acquire(timeout=max(end - time.monotonic(), 0))


atexit.register(lambda: drop(messages for threads in _all for messages in threads.pending.copy()))
