"""Small messages between all ranks of a group: each rank's bytes for all, or the largest of a few numbers.

With gloo they go point to point. In a small group each rank writes to each; in a large one they go in rounds, whose
number is the logarithm of the group's size. On other groups they are collectives of torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.comm.group import (
    PeerCheck,
    TaggedMessages,
    collective_device,
    is_large,
    is_tagged,
    listed,
    ranks_of,
    tagged_messages,
    traffic,
)
from shardwise.comm.peers import BackgroundRun, raise_lost, wait_for_device
from shardwise.comm.tracing import record

# torch 2.13 gave the collective a new name and deprecated the old one, the only one before.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

HEADER = 128  # bytes of a header; what is no longer goes to each rank at once, sooner there than around the ring


class _Exchange:
    """What both kinds have in common."""

    _run: BackgroundRun | None = None  # which the exchange is a part of; else it is one of the group's calls

    def __init__(self, process_group: ProcessGroup, tag: int, size: int) -> None:
        traffic.count += 1
        self._traced = record.begin("meeting", size, size) if record.running and size else None
        self._group, self._tag, self._size = process_group, tag, process_group.size()
        self._here = process_group.rank()

    def _sent(self, give: torch.Tensor, to: int, take: torch.Tensor, source: int) -> TaggedMessages:
        """Begin a round in which this rank sends to one and receives from one."""
        message = TaggedMessages(self._group)
        message.receive(take, source % self._size, self._tag)
        message.send(give, to % self._size, self._tag)
        return message

    def _ended(self, complete: Callable[[], Any]) -> None:
        """Wait for it."""
        if self._traced is not None:
            self._traced.waits()
        self._attempt(complete)
        if self._traced is not None:
            self._traced.end()

    def _attempt(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except (RuntimeError, TimeoutError) as error:
            what = f"compare with ranks {listed(ranks_of(self._group))} what they are about to do"
            self._raise_lost(what, error)

    def _raise_lost(self, what: str, error: Exception) -> NoReturn:
        if self._run is not None:
            self._run.raise_lost(what, error)
        raise_lost(what, error, self._group)

    def _finish(self, work: Any, device: torch.device, look: PeerCheck | None) -> None:
        """Wait for a collective. Whenever that takes long, it is looked whether to go on waiting."""
        patience, everyone = tagged_messages.PATIENCE, range(self._size)
        while look is not None and not _is_over(work, device, patience):
            look(everyone)
            patience = min(1.5 * patience, tagged_messages.AT_MOST)
        try:
            work.wait()
        except RuntimeError:
            if look is not None:
                look(everyone)  # a rank that is gone may have said why
            raise


class Gathering(_Exchange):
    """What every rank gives, on every rank: bytes, filled up to the same length."""

    def __init__(
        self, process_group: ProcessGroup, data: bytes, longest: int, tag: int, run: BackgroundRun | None = None
    ) -> None:
        super().__init__(process_group, tag, longest * (process_group.size() - 1))
        self._run = run
        self._longest, self._device = longest, collective_device(process_group)
        if self._device.type != "cpu":
            wait_for_device(process_group, self._device)
        if longest:
            self._mine = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8).to(self._device)
            self._all = torch.empty(self._size * longest, dtype=torch.uint8, device=self._device)
            self._attempt(self._begin)

    def _begin(self) -> None:
        group, each = self._group, not is_large(self._group)
        self._post: TaggedMessages | None = None
        if is_tagged(group) and each:
            self._post = TaggedMessages(group)
            slots = self._all.view(self._size, self._longest).unbind()
            others = [peer for peer in range(self._size) if peer != self._here]
            for peer in others:
                self._post.receive(slots[peer], peer, self._tag)
            for peer in others:
                self._post.send(self._mine, peer, self._tag)
            slots[self._here].copy_(self._mine)
        elif not is_tagged(group):
            each = each and self._longest <= HEADER
            self._mine = self._mine.repeat(self._size) if each else self._mine
            send = dist.all_to_all_single if each else _all_gather_single
            self._work = send(self._all, self._mine, group=group, async_op=True)

    def wait(self, look: PeerCheck | None, patience: float | None = None) -> list[bytes]:
        """What every rank gives, in group order."""
        longest = self._longest
        if longest == 0:
            return [b""] * self._size
        self._ended(lambda: self._complete(look, patience))
        found = bytes(self._all.cpu().numpy())
        return [found[begin : begin + longest] for begin in range(0, self._size * longest, longest)]

    def _complete(self, look: PeerCheck | None, patience: float | None) -> None:
        if not is_tagged(self._group):
            self._finish(self._work, self._device, look)
        elif self._post is not None:
            self._post.wait(look or _nothing, patience)
        else:
            self._in_rounds(look or _nothing, patience)

    def _in_rounds(self, look: PeerCheck, patience: float | None) -> None:
        """Each round doubles how many ranks' bytes this one has, which begin with its own."""
        length = self._longest
        rolled = torch.empty_like(self._all)
        rolled[:length].copy_(self._mine)
        have = 1
        while have < self._size:
            more = min(have, self._size - have)
            give, take = rolled[: more * length], rolled[have * length : (have + more) * length]
            self._sent(give, self._here - have, take, self._here + have).wait(look, patience)
            have += more
        self._all = rolled.view(self._size, length).roll(self._here, 0).reshape(-1)


class Reduction(_Exchange):
    """The largest of each of a few numbers: what a rank pays hardly grows with the group."""

    def __init__(self, process_group: ProcessGroup, numbers: Sequence[int], tag: int) -> None:
        super().__init__(process_group, tag, 8 * len(numbers) * (process_group.size() - 1).bit_length())
        self._device = collective_device(process_group)
        if self._device.type != "cpu":
            wait_for_device(process_group, self._device)
        self._numbers = torch.tensor(numbers, dtype=torch.int64).to(self._device)
        self._attempt(self._begin)

    def _begin(self) -> None:
        self._distance = 1
        if is_tagged(self._group):
            self._round()
        else:
            self._work = dist.all_reduce(self._numbers, dist.ReduceOp.MAX, group=self._group, async_op=True)

    def _round(self) -> None:
        """Tell the rank at this distance, and hear of the one at this distance on the other side."""
        self._came = torch.empty_like(self._numbers)
        give = self._numbers.clone()
        self._post = self._sent(give, self._here + self._distance, self._came, self._here - self._distance)

    def wait(self, look: PeerCheck | None, patience: float | None = None) -> list[int]:
        """The largest that any rank has given, for each number."""
        self._ended(lambda: self._complete(look, patience))
        return self._numbers.tolist()

    def _complete(self, look: PeerCheck | None, patience: float | None) -> None:
        if not is_tagged(self._group):
            return self._finish(self._work, self._device, look)
        while True:
            self._post.wait(look or _nothing, patience)
            torch.maximum(self._numbers, self._came, out=self._numbers)
            self._distance *= 2
            if self._distance >= self._size:
                return None
            self._round()


def _nothing(_: Sequence[int]) -> None:
    """Keep waiting."""


def _is_over(work: Any, device: torch.device, patience: float) -> bool:
    """Whether a collective has ended within so many seconds, or is known not to."""
    begun = time.monotonic()
    if device.type == "cpu":
        with suppress(RuntimeError):  # it takes longer; or it has failed, which whoever waits for it will find
            work.wait(timedelta(seconds=patience))
            return True
    while not work.is_completed():  # of NCCL, whose own waiting with a time limit ends the group
        waited = time.monotonic() - begun
        if waited >= patience:
            return False
        time.sleep(0 if waited < 0.001 else 0.0001)
    return True


def wait_for_data(work: Any, process_group: ProcessGroup, look: PeerCheck) -> None:
    """Wait for a collective of the CPU on a group without tags, and look from time to time what the others do."""
    patience = tagged_messages.PATIENCE
    while not _is_over(work, torch.device("cpu"), patience):
        look(range(process_group.size()))
        patience = min(1.5 * patience, tagged_messages.AT_MOST)
    work.wait()
