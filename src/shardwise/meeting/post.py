"""Messages point to point by tag, on groups whose memory of the CPU is sent by gloo.

Two messages that do not have the same tag never meet, whatever their sizes, so ranks that do different things wait for
each other and can find out why. gloo breaks the connection when a wait has a time limit that passes. So threads wait
for the messages, without a limit, and the rank waits for the thread. A rank that gives up leaves the thread to it.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup

from shardwise.meeting.group import gloo_of, timeout_of

PATIENCE = 1.0  # seconds after which a rank that waits looks what the others are doing
AT_MOST = 2.0  # between two looks
AT_THE_END = 10.0  # that threads get to come back before Python ends, which takes long on a busy machine only
FOREVER = timedelta(days=365)
NOBODYS = 1  # the tag of a message that nobody sends

Works = list[tuple[Any, int, torch.Tensor]]  # with the other end, and memory that must live so long
Look = Callable[[Sequence[int]], object]  # given who is waited for, by number in the group; raises to give up


class Post:
    """Messages of one exchange."""

    def __init__(self, process_group: ProcessGroup) -> None:
        self._group, self._gloo = process_group, gloo_of(process_group)  # straight, past torch's dispatcher
        self._works: Works = []
        keeper()  # before the garbage collector needs it

    def __del__(self) -> None:
        """If nobody has waited: the messages still come and go, or those after them would not either."""
        if self._works:
            keeper().take([self], tuple)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Begin to receive from a rank, by its number in the group."""
        self._works.append((self._gloo.recv([tensor], peer, tag), peer, tensor))

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Begin to send to a rank, by its number in the group."""
        self._works.append((self._gloo.send([tensor], peer, tag), peer, tensor))

    def wait(self, look: Look, patience: float | None = None) -> None:
        """Until all messages have come and gone. RuntimeError: a rank is gone; TimeoutError: it takes too long."""
        if not self._works:
            return
        job = _Job(self._gloo, self._works)
        _hand_over(job)
        self._works = []
        patience = PATIENCE if patience is None else patience
        if not job.done.acquire(timeout=patience):
            self._wait_long(job, look, patience)
        if job.error is not None:
            look(job.peers())  # a rank that is gone may have said why
            raise job.error

    def _wait_long(self, job: _Job, look: Look, patience: float) -> None:
        end = time.monotonic() - patience + timeout_of(self._group).total_seconds()
        while True:
            look(job.peers())
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError
            patience = min(1.5 * patience, AT_MOST)
            if job.done.acquire(timeout=min(patience, left)):
                return


class Keeper(threading.Thread):
    """A thread that takes messages which nobody waits for, and has them waited for. It ends with the process.

    The garbage collector may hand them over, at any moment: it must not start threads, which takes locks.
    """

    def __init__(self) -> None:
        super().__init__(name="shardwise-keeper", daemon=True)
        self._left: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self.start()

    def take(self, posts: Sequence[Post], then: Callable[[], Sequence[Post]]) -> None:
        """When these messages have come and gone, the next ones are begun, until there are none or one fails."""
        if posts:
            self._left.put(_Job(posts[0]._gloo, _works_of(posts), lambda: _works_of(then())))

    def run(self) -> None:
        """One after the other."""
        while True:
            _hand_over(self._left.get())


_keepers: list[Keeper] = []
os.register_at_fork(after_in_child=_keepers.clear)


def keeper() -> Keeper:
    """The one of this process."""
    if not _keepers:
        _keepers.append(Keeper())
    return _keepers[0]


def _works_of(posts: Sequence[Post]) -> Works:
    """All messages that are under way there, which somebody else waits for from now on."""
    found = [work for post in posts for work in post._works]
    for post in posts:
        post._works = []
    return found


class _Job:
    """Messages that a thread waits for, and those after them."""

    def __init__(self, gloo: Any, works: Works, then: Callable[[], Works] | None = None) -> None:
        self.gloo, self.works, self._then = gloo, works, then
        self.at = 0
        self.error: Exception | None = None
        self.done = threading.Lock()
        self.done.acquire()

    def peers(self) -> list[int]:
        """Who is waited for."""
        return [peer for _, peer, _ in self.works[self.at :]]

    def run(self) -> None:
        """Wait for all of them."""
        try:
            while self.works:
                for work, _, _ in self.works:
                    work.wait(FOREVER)
                    self.at += 1
                if self._then is None:
                    return
                self.works, self.at = self._then(), 0
        except Exception as error:  # whoever waits raises it
            self.error = error


class _Waiter(threading.Thread):
    """A thread that waits for one job after the other. It ends with the process."""

    def __init__(self) -> None:
        super().__init__(name="shardwise-waiter", daemon=True)
        self.jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            job = self.jobs.get()
            job.run()
            _waited_for.discard(job)
            _idle.append(self)
            job.done.release()
            del job  # and its memory


_idle: list[_Waiter] = []
_waited_for: set[_Job] = set()
os.register_at_fork(after_in_child=_idle.clear)
os.register_at_fork(after_in_child=_waited_for.clear)


def let_go(jobs: Sequence[_Job]) -> None:
    """End waits that were given up, before Python ends: a thread that comes back later would abort the process.

    gloo has one way for that: a wait whose time limit passes breaks the connection.
    """
    for job in jobs:
        for peer in job.peers():
            with suppress(RuntimeError, ValueError):
                job.gloo.recv([torch.empty(1, dtype=torch.uint8)], peer, NOBODYS).wait(timedelta(milliseconds=1))
    end = time.monotonic() + AT_THE_END
    for job in jobs:
        job.done.acquire(timeout=max(end - time.monotonic(), 0))


atexit.register(lambda: let_go(tuple(_waited_for)))


def _hand_over(job: _Job) -> None:
    _waited_for.add(job)
    try:
        waiter = _idle.pop()
    except IndexError:  # all of them wait, some for ranks that have given up
        waiter = _Waiter()
    waiter.jobs.put(job)
