"""A rank that is gone: also those are told that wait for others, which have lost it, and not for itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import chunks
from tests.comm.disagreement.given import impatient
from tests.deaths import WORLD, others_go_on
from tests.patience import PATIENT

import shardwise
from shardwise import StateTransfer
from shardwise.comm.agreement.steps import in_step
from shardwise.comm.group import backend
from shardwise.comm.peers import status
from shardwise.comm.peers.store_channel import StoreChannel
from shardwise.errors import RankMismatchError, TransferError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

PLAIN = torch.arange(48.0).reshape(8, 6)
ROWS, NEXT = chunks(0, 0, 1, 2, 3), chunks(0, 0, 0, 1, 2)  # from one to the other each rank waits for the next one
DIES = WORLD - 1


def again(call: Callable[[], object]) -> Callable[[], None]:
    """The call, until those are behind that each rank still has what it needs for."""

    def calls() -> None:
        for _ in range(WORLD):
            call()

    return calls


def a_rank_is_gone(folder: str) -> None:
    """Rank 3 dies; then each of these is called on the others, in a group of its own with all four ranks."""
    there, new = Path(folder) / "there", Path(folder) / "new"
    groups = [dist.new_group(range(WORLD)) for _ in range(8)]
    x = [shard_tensor(PLAIN, ROWS, process_group=one) for one in groups]
    y = [shardwise.zeros(NEXT, *PLAIN.shape, process_group=one) for one in groups]
    healthy = shard_tensor(PLAIN, chunks(0, 0, 1, 2), process_group=dist.new_group(range(DIES)))
    transfer = StateTransfer({"x": x[0]}, {"x": y[0]}, process_group=groups[0])
    shardwise.save({"x": x[1]}, there, process_group=groups[1])
    neighbours: dict[str, Callable[[], object]] = {
        "a state": again(transfer.run),
        "in one exchange": again(lambda: x[2].redistribute(NEXT)),
        "in rounds": again(lambda: x[3].redistribute(NEXT, max_bytes=64)),
        "an op": again(lambda: y[4].add_(x[4])),
    }
    meetings: dict[str, Callable[[], object]] = {
        "load": lambda: shardwise.load({"x": x[1]}, there, process_group=groups[1]),
        "save": lambda: shardwise.save({"x": x[5]}, new, process_group=groups[5]),
        "check": lambda: shardwise.check(groups[6]),
        "a verb": x[7].full_tensor,
    }
    if dist.get_rank() == DIES:
        os._exit(1)
    with impatient(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "MOST_EACH", 2)  # in meetings, too, ranks talk to few others
        for name, call in {**neighbours, **meetings}.items():
            with shardwise.validation(enabled=name in meetings):
                for _ in range(1 if name == "a state" else 2):  # it stays so; of states the ranks have run unlike many
                    with pytest.raises(TransferError, match=f"(?s)could not .*rank {DIES} is gone"):
                        call()
            assert torch.equal(healthy.full_tensor(), PLAIN), name
        patch.setattr(status, "store_of", lambda _: _Gone())
        if dist.get_rank() != 1:  # which is told by the store alone
            with pytest.raises(TransferError, match=f"rank {DIES} is gone"):
                shardwise.check(groups[6])


class _Gone:
    """The store of a rank that is gone."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Broken pipe")


def test_whoever_waits_for_a_rank_that_has_lost_another_is_told(tmp_path: Path) -> None:
    """Each rank waits for the next, and the last one is gone: all that are left say so, soon, in whatever they are; and
    they can go on in a group without it."""
    others_go_on(a_rank_is_gone, str(tmp_path), dies=DIES)


@pytest.mark.parametrize("decided", [False, True])
@ranks(2)
def test_a_loss_that_is_found_while_another_rank_looks(decided: bool) -> None:
    """Who finds it goes on to other calls. A rank that reads so raises the loss, and not that ranks are out of step;
    unless other ranks have raised that meanwhile, as they then all do."""
    store, group = dist.distributed_c10d._get_default_store(), dist.new_group([0, 1])
    channel = StoreChannel(store, f"test_a_loss_that_is_found, {decided}")
    mismatch = ["mismatch", "ranks 0 and 1 are out of step"]
    if dist.get_rank() == 1:
        status.publish(group)
        channel.write("published", True)
        assert not channel.wait(["looks"], PATIENT)
        if decided:
            status.epoch_channel(group).decide(mismatch)
        status.notify_of_loss(group, TransferError("rank 2 is gone"))
        channel.write("found", True)
        return
    read = StoreChannel.read

    def before_it_is_found(self: StoreChannel, key: object) -> Any:
        value = read(self, key)
        if key == "loss" and not read(channel, "looks"):
            channel.write("looks", True)
            assert not channel.wait(["found"], PATIENT)
        return value

    assert not channel.wait(["published"], PATIENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreChannel, "read", before_it_is_found)
        patch.setattr(status, "mismatch", lambda *_: mismatch)
        found = status.find_verdict(group, [1])
    assert isinstance(found, RankMismatchError if decided else TransferError)
    assert ("out of step" if decided else "rank 2 is gone") in str(found)


def raises_and_ends() -> None:
    """Ranks 3 and 2 raise an error of their own, and rank 3 ends; the others come to that call when it has."""
    store, here = dist.distributed_c10d._get_default_store(), dist.get_rank()
    shardwise.check()
    if here < 2:
        store.wait(["over"])
        with pytest.raises(RuntimeError):  # as soon as the connection is closed; nobody sends this
            dist.recv(torch.zeros(1), DIES, tag=77)

    def refuse() -> Any:
        if here > 1:
            raise ValueError("no such thing")
        return None, {"verb": "do it"}

    with impatient(), pytest.raises(ValueError, match="no such thing"):
        in_step(dist.group.WORLD, refuse)
    if here == DIES:
        store.set("over", "")
        os._exit(1)


def test_a_rank_that_has_raised_an_error_and_ended_has_said_which() -> None:
    """Whoever comes later raises that, and not that it is gone."""
    others_go_on(raises_and_ends, dies=DIES)
