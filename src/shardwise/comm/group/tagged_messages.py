"""Messages point to point by tag, on groups whose memory of the CPU is sent by gloo.

Two messages that do not have the same tag never meet, whatever their sizes, so ranks that do different things wait for
each other and can find out why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch.distributed import ProcessGroup

from shardwise.comm.group.backend import gloo_of, timeout_of
from shardwise.comm.group.message_threads import PendingMessages, Works
from shardwise.comm.group.state import group_state

PATIENCE = 1.0  # seconds after which a rank that waits looks what the others are doing
AT_MOST = 2.0  # between two looks

PeerCheck = Callable[[Sequence[int]], object]  # given who is waited for, by number in the group; raises to give up


class TaggedMessages:
    """Messages of one exchange."""

    def __init__(self, process_group: ProcessGroup) -> None:
        self._group, self._gloo = process_group, gloo_of(process_group)  # straight, past torch's dispatcher
        self._threads = group_state(process_group).message_threads
        self._threads.start()  # before the garbage collector needs one
        self._works: Works = []

    def __del__(self) -> None:
        """If nobody has waited: the messages still come and go, or those after them would not either."""
        if self._works:
            abandon([self], tuple)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Begin to receive from a rank, by its number in the group."""
        self._works.append((self._gloo.recv([tensor], peer, tag), peer, tensor))

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> None:
        """Begin to send to a rank, by its number in the group."""
        self._works.append((self._gloo.send([tensor], peer, tag), peer, tensor))

    def wait(self, look: PeerCheck, patience: float | None = None) -> None:
        """Until all messages have come and gone. RuntimeError: a rank is gone; TimeoutError: it takes too long."""
        if not self._works:
            return
        job = PendingMessages(self._gloo, self._works)
        self._threads.start()
        self._threads.wait_for(job)
        self._works = []
        patience = PATIENCE if patience is None else patience
        if not job.done.acquire(timeout=patience):
            self._wait_long(job, look, patience)
        if job.error is not None:
            look(job.peers())  # a rank that is gone may have said why
            raise job.error

    def _wait_long(self, job: PendingMessages, look: PeerCheck, patience: float) -> None:
        end = time.monotonic() - patience + timeout_of(self._group).total_seconds()
        while True:
            look(job.peers())
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError
            patience = min(1.5 * patience, AT_MOST)
            if job.done.acquire(timeout=min(patience, left)):
                return


def abandon(posts: Sequence[TaggedMessages], following: Callable[[], Sequence[TaggedMessages]]) -> None:
    """Nobody waits for these messages: they still come and go, or those after them would not either.

    When they have, the next ones are begun, until there are none or one fails. The garbage collector may call it.
    """
    if posts:
        first = posts[0]
        first._threads.wait_for(PendingMessages(first._gloo, _works_of(posts), lambda: _works_of(following())))


def _works_of(posts: Sequence[TaggedMessages]) -> Works:
    """All messages that are under way there, which somebody else waits for from now on."""
    found = [work for post in posts for work in post._works]
    for post in posts:
        post._works = []
    return found
