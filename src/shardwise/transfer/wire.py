"""Bytes on the wire between all ranks of a group, and collectives of the backend under way.

Where gloo sends them, they go point to point, between ranks that have something for each other, with a tag that only
ranks with the same history know: a rank in another call never reads them. Elsewhere they go in a collective of torch.
Every collective of an accelerator begins in `Collective`, which has it watched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.layout import Layout
from shardwise.meeting import (
    BEGINNING,
    Post,
    Said,
    break_off,
    find_verdict,
    is_tagged,
    ledger_of,
    look,
    wait_for_data,
    watch,
)
from shardwise.meeting.chain import DIGEST
from shardwise.transfer.plan import TransferPlan

Messages = Sequence[torch.Tensor]  # bytes, one for each member of a group in order; empty where there is nothing


class Exchanging(Protocol):
    """An exchange under way."""

    def wait(self) -> None:
        """Until all has come; with NCCL, until it is enqueued on the stream."""


def exchange(group: ProcessGroup, taken: Messages, given: Messages, tag: int) -> Exchanging:
    """Begin to give each member a message, and to take one from each; all lie on the wire's device, anywhere there."""
    if given[0].device.type != "cpu":
        return Collective(group, given[0].device, dist.all_to_all, list(taken), list(given))
    return _Tagged(group, taken, given, tag) if is_tagged(group) else _Packed(group, taken, given)


class _Tagged:
    """Point to point."""

    def __init__(self, group: ProcessGroup, taken: Messages, given: Messages, tag: int) -> None:
        here, self._group, self._post = group.rank(), group, Post(group)
        self._epoch = ledger_of(group).epoch
        after = [*range(here + 1, len(given)), *range(here)]  # the next one first: so not all send to the same one
        for peer in reversed(after):
            if taken[peer].numel():
                self._post.receive(taken[peer], peer, tag)
        for peer in after:
            if given[peer].numel():
                self._post.send(given[peer], peer, tag)
        if given[here].numel():
            taken[here].copy_(given[here])

    def wait(self) -> None:
        """Until all has come and gone."""
        self._post.wait(lambda peers: look(self._group, peers, self._epoch))


class Collective:
    """A collective of the backend."""

    def __init__(self, group: ProcessGroup, wire: torch.device, begin: Callable[..., Any], *args: Any) -> None:
        self._group, self._wire, self._memory = group, wire, args  # which must live until it is sent
        if wire.type != "cpu":
            watch(BEGINNING, group)  # which may block already, when a backend connects ranks for the first time
        self._work = begin(*args, group=group, async_op=True)
        assert self._work is not None, "only an outsider of the group gets no work"
        if wire.type != "cpu":
            watch(self._work, group)

    def wait(self) -> None:
        """The host waits for the CPU only."""
        if self._wire.type == "cpu":
            wait_for_data(self._work, self._group, self._look)
        else:
            self._work.wait()
        self._memory = ()

    def _look(self, peers: Sequence[int]) -> None:
        """A collective cannot be called back: after an error the ranks are out of step."""
        error = find_verdict(self._group, peers)
        if error is not None:
            break_off(self._group, error)
            raise error


class _Packed(Collective):
    """In one all-to-all from one run of memory into another."""

    def __init__(self, group: ProcessGroup, taken: Messages, given: Messages) -> None:
        self._taken, sizes = taken, [each.numel() for each in taken]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        self._arrived = buffer.split_with_sizes(sizes)
        splits = sizes, [each.numel() for each in given]
        super().__init__(group, buffer.device, dist.all_to_all_single, buffer, torch.cat(list(given)), *splits)

    def wait(self) -> None:
        """And bring each message to its place."""
        super().wait()
        for one, other in zip(self._taken, self._arrived, strict=True):
            one.copy_(other)


def said_of(plan: TransferPlan, dtype: torch.dtype, max_bytes: int | None, verb: str) -> Said:
    """What all ranks must say alike of a transfer."""
    return _said(plan.src, plan.dst, plan.sums, dtype, max_bytes, verb)


@lru_cache(maxsize=1024)
def _said(src: Layout, dst: Layout, sums: bool, dtype: torch.dtype, max_bytes: int | None, verb: str) -> Said:
    def fields() -> dict[str, object]:
        named = {"verb": verb, "from": src.outline, "to": dst.outline, "dtype": dtype}
        return {**named, "sums": sums, "max_bytes": max_bytes}

    rest = f"{sums} {dtype} {max_bytes} {verb}".encode()
    return Said(fields, hashlib.blake2b(src.digest + dst.digest + rest, digest_size=DIGEST).digest())
