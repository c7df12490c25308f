"""Messages that a thread packs ahead: each is whole when it is given, and whoever sends is told what went wrong."""

from __future__ import annotations

import threading
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from tests.cases import chunks, holds

import shardwise
from shardwise import StateTransfer
from shardwise.comm.transfer import copies
from shardwise.comm.transfer.copies import Copies, Packer
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

PLAIN = torch.arange(48.0).reshape(8, 6)


class Failing(Copies):
    """Copies that cannot be made."""

    def make(self) -> None:
        """Not."""
        raise MemoryError("no memory")


class Noted(Copies):
    """Copies that say in which thread they were made."""

    threads: ClassVar[list[str]] = []

    def make(self) -> None:
        """And make them."""
        self.threads.append(threading.current_thread().name)
        super().make()


def messages(*kinds: type[Copies] | None) -> tuple[list[Any], torch.Tensor, torch.Tensor]:
    """One message of each kind, what is in them, and their memory."""
    source, memory = torch.arange(1.0, 4 * len(kinds) + 1).reshape(-1, 4), torch.zeros(len(kinds), 4)
    some = [None if kind is None else kind([(memory[k], source[k])]) for k, kind in enumerate(kinds)]
    return [(one, (k, memory[k])) for k, one in enumerate(some)], source, memory


@pytest.mark.parametrize("worth", [0, 2**20])
def test_messages_are_given_in_order_when_they_are_packed(worth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread or not, with such that need no packing; one that cannot be packed is not given, nor any after it."""
    monkeypatch.setattr(copies, "WORTH_A_THREAD", worth)
    monkeypatch.setattr(Noted, "threads", list[str]())
    packer = Packer()
    some, source, _ = messages(Noted, None, Noted, Noted)
    for number, (rank, memory) in enumerate(packer.packed(some)):
        assert rank == number
        assert torch.equal(memory, source[rank] * (rank != 1))
    assert len(Noted.threads) == 3
    assert all(name.startswith("shardwise-packing") == (worth == 0) for name in Noted.threads)
    some, source, memory = messages(Noted, Failing, Noted)
    given = packer.packed(some)
    assert next(given)[0] == 0
    with pytest.raises(MemoryError, match="no memory"):
        next(given)
    assert len(Noted.threads) == 4
    assert torch.equal(memory[0], source[0])
    assert not memory[1:].any()


def test_where_there_can_be_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of a process: they are packed all the same."""
    monkeypatch.setattr(copies, "WORTH_A_THREAD", 0)
    packer = Packer()
    packer._threads.shutdown()
    some, source, memory = messages(Copies, Copies)
    assert [rank for rank, _ in packer.packed(some)] == [0, 1]
    assert torch.equal(memory, source)


@ranks(3)
def test_inference_mode() -> None:
    """A transfer may be made in it, run in it and run outside of it, and so may its targets; staged and not, with
    messages that a thread packs and without."""
    source = {name: shard_tensor(PLAIN, chunks(0, 0, 1, 2)) for name in "ab"}
    for worth, is_made, is_run, in_targets, staged in product((0, 2**20), *[(False, True)] * 4):
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode(in_targets):
            patch.setattr(copies, "WORTH_A_THREAD", worth)
            target = {name: shardwise.zeros(chunks(1, 0, 1, 2), 8, 6) for name in "ab"}
            with torch.inference_mode(is_made):
                transfer = StateTransfer(source, target, staged=staged)
            for mode in (is_run, not is_run):
                with torch.inference_mode(mode):
                    transfer.run()
                assert all(holds(tensor, PLAIN) for tensor in target.values())
                with torch.inference_mode():
                    for tensor in target.values():
                        for shard in tensor.local_shards():
                            shard.tensor.zero_()
