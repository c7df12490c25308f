"""Bytes on the wire between all ranks of a group.

Where gloo sends them, they go point to point, between ranks that have something for each other, with a tag that only
ranks with the same history know: a rank in another call never reads them. Elsewhere they go in a collective of torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.layout import Layout
from shardwise.meeting import Post, Said, break_off, find_verdict, is_tagged, ledger_of, look, wait_for_data, watch
from shardwise.meeting.chain import DIGEST
from shardwise.process_group import begin_sending
from shardwise.transfer.plan import Plan
from shardwise.transfer.views import as_bytes

SMALL = 4096  # bytes of a tensor that is added up whole, in one round


class Exchanging(Protocol):
    """An exchange under way."""

    def wait(self) -> None:
        """Until all has come; with NCCL, until it is enqueued on the stream."""


def exchange(
    group: ProcessGroup, taken: torch.Tensor, given: torch.Tensor, out: list[int], into: list[int], tag: int
) -> Exchanging:
    """Begin to give so many bytes to each member, and to take so many from each, one member after the other.

    Both tensors are bytes on the wire's device.
    """
    if given.device.type == "cpu" and is_tagged(group):
        return _Tagged(group, taken, given, out, into, tag)
    return _Collective(group, taken, given, out, into)


class _Tagged:
    """Point to point."""

    def __init__(
        self, group: ProcessGroup, taken: torch.Tensor, given: torch.Tensor, out: list[int], into: list[int], tag: int
    ) -> None:
        here, self._group, self._post = group.rank(), group, Post(group)
        self._epoch = ledger_of(group).epoch
        takes, gives = taken.split_with_sizes(out), given.split_with_sizes(into)
        after = [*range(here + 1, len(out)), *range(here)]  # the next one first, so that not all send to the same one
        for peer in reversed(after):
            if out[peer]:
                self._post.receive(takes[peer], peer, tag)
        for peer in after:
            if into[peer]:
                self._post.send(gives[peer], peer, tag)
        if into[here]:
            takes[here].copy_(gives[here])

    def wait(self) -> None:
        """Until all has come and gone."""
        self._post.wait(lambda peers: look(self._group, peers, self._epoch))


class _Collective:
    """In one all-to-all."""

    def __init__(
        self, group: ProcessGroup, taken: torch.Tensor, given: torch.Tensor, out: list[int], into: list[int]
    ) -> None:
        self._group, self._given = group, given  # which must live until it is sent
        self._work = dist.all_to_all_single(taken, given, out, into, group=group, async_op=True)
        if given.device.type != "cpu":
            watch(self._work, group)

    def wait(self) -> None:
        """The host waits for the CPU only."""
        assert self._work is not None, "only an outsider of the group gets no work"
        if self._given.device.type == "cpu":
            wait_for_data(self._work, self._group, self._look)
        else:
            self._work.wait()

    def _look(self, peers: Sequence[int]) -> None:
        """A collective cannot be called back: after an error the ranks are out of step."""
        error = find_verdict(self._group, peers)
        if error is not None:
            break_off(self._group, error)
            raise error


def said_of(plan: Plan, dtype: torch.dtype, max_bytes: int | None, verb: str) -> Said:
    """What all ranks must say alike of a transfer."""
    return _said(plan.src, plan.dst, plan.sums, dtype, max_bytes, verb)


@lru_cache(maxsize=1024)
def _said(src: Layout, dst: Layout, sums: bool, dtype: torch.dtype, max_bytes: int | None, verb: str) -> Said:
    def fields() -> dict[str, object]:
        named = {"verb": verb, "from": src.outline, "to": dst.outline, "dtype": dtype}
        return {**named, "sums": sums, "max_bytes": max_bytes}

    rest = f"{sums} {dtype} {max_bytes} {verb}".encode()
    return Said(fields, hashlib.blake2b(src.digest + dst.digest + rest, digest_size=DIGEST).digest())


def add_up(group: ProcessGroup, tensor: torch.Tensor, said: Said) -> None:
    """Add up a contiguous tensor of the CPU over all ranks of a group, in place, on a group with tags.

    Of a large one each rank adds up a chunk, and gives it to all. Terms are added in the order of the ranks, so that
    all have the same sum.
    """
    tag, size, here = begin_sending(group, said), group.size(), group.rank()
    flat = tensor.view(-1)
    whole = tensor.nbytes <= SMALL
    chunks = [flat] * size if whole else list(flat.tensor_split(size))
    others = [peer for peer in range(size) if peer != here]
    terms = [chunks[here] if peer == here else torch.empty_like(chunks[here]) for peer in range(size)]
    _swapped(group, {peer: chunks[peer] for peer in others}, {peer: terms[peer] for peer in others}, tag)
    total = terms[0].clone()
    for term in terms[1:]:
        total.add_(term)
    chunks[here].copy_(total)
    if not whole:
        _swapped(group, dict.fromkeys(others, chunks[here]), {peer: chunks[peer] for peer in others}, tag)


def _swapped(
    group: ProcessGroup, given: Mapping[int, torch.Tensor], taken: Mapping[int, torch.Tensor], tag: int
) -> None:
    """Give tensors to members, and take some from them."""
    post = Post(group)
    for peer, tensor in taken.items():
        if tensor.numel():
            post.receive(as_bytes(tensor), peer, tag)
    for peer, tensor in given.items():
        if tensor.numel():
            post.send(as_bytes(tensor), peer, tag)
    post.wait(lambda peers: look(group, peers))
