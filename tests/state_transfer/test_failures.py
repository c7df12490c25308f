"""Transfers that cannot be: all that is wrong is one error on every rank, before anything moves and soon after."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import chunks, holds
from tests.comm.disagreement.given import impatient
from tests.deaths import others_go_on

import shardwise
from shardwise import StateTransfer
from shardwise.comm.transfer import rounds
from shardwise.comm.transfer.segments import Load
from shardwise.errors import RankMismatchError, RecipeError, StateMismatchError, TransferError
from shardwise.state_transfer import cat
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

PLAIN = torch.arange(48.0).reshape(8, 6)
ROWS, COLUMNS = chunks(0, 0, 1, 2, 3), chunks(1, 2, 3)
ODD = 1  # the rank that does otherwise


def sharded(spec: Any = ROWS, *, dtype: torch.dtype = torch.float32) -> Any:
    """The tensor of all these tests."""
    return shard_tensor(PLAIN.to(dtype), spec)


def message_everywhere(function: Callable[[], object], kind: type[Exception]) -> str:
    """What all ranks raise: the same kind and words, but for a note of the rank on which it was found."""
    with pytest.raises(kind) as caught:
        function()
    texts: list[str] = [""] * 4
    dist.all_gather_object(texts, str(caught.value).partition("\n(found on rank")[0])
    assert len(set(texts)) == 1, texts
    return texts[0]


@ranks(4)
def test_states_that_do_not_fit_are_one_error() -> None:
    """On every rank the same, with everything that is wrong; and the ranks can go on."""
    odd = dist.get_rank() == ODD
    a, b = sharded(), sharded(COLUMNS)
    narrow, other = shardwise.zeros(ROWS, 8, 5), sharded()
    wrong: list[tuple[Callable[[], object], type[Exception], tuple[str, ...]]] = [
        (
            lambda: StateTransfer({"a": a, "x": a}, {"a": narrow, "y": b, "z": b}),
            RecipeError,
            ("(8, 6)", "(8, 5)", "'x'", "'y'", "'z'"),
        ),
        (
            lambda: StateTransfer({"a": PLAIN if odd else a}, {"a": b}),
            StateMismatchError,
            ("'a' of the source has another layout on rank",),
        ),
        (
            lambda: StateTransfer({"a": PLAIN[odd:]}, {"a": b}),
            StateMismatchError,
            ("'a' of the source is of size (7, 6) and (8, 6)",),
        ),
        (
            lambda: StateTransfer({"a": PLAIN.to(torch.float64 if odd else torch.float32)}, {"a": b}),
            StateMismatchError,
            ("'a' of the source is of float32 and float64",),
        ),
        (lambda: StateTransfer({"a": a.sharding}, {"a": b}), StateMismatchError, ("'a' of the source is nowhere",)),
        (
            lambda: StateTransfer({"a": a.sharding if odd else a}, {"a": b}),
            StateMismatchError,
            ("rank 1 has boxes of 'a' of the source, and gives only the layout",),
        ),
        (
            lambda: StateTransfer({"a": a}, {"a": b.sharding}),
            StateMismatchError,
            ("is to get boxes of 'a'", "on_arrival"),
        ),
        (lambda: StateTransfer({"a": a if not odd else 3}, {"a": b}), StateMismatchError, ("'a' is a int",)),
        (lambda: StateTransfer([a] if odd else {"a": a}, {"a": b}), StateMismatchError, ("found list",)),
        (
            lambda: StateTransfer({"a": a}, {"a": b}, max_bytes=2**20 + odd),
            RankMismatchError,
            ("max_bytes property does not match",),
        ),
        (
            lambda: StateTransfer({"a": sharded(dtype=torch.complex64)}, {"a": b}),
            StateMismatchError,
            ("imaginary", "'a' of the target is torch.float32"),
        ),
        (
            lambda: StateTransfer(
                {"a": a, "x": sharded(dtype=torch.float8_e4m3fn)},
                {"b": ROWS.layout((16, 6))},
                recipe={"b": cat("a", "x")},
                on_arrival=print,
            ),
            StateMismatchError,
            ("no dtype holds all that makes 'b'", "'x' is torch.float8_e4m3fn"),
        ),
        (
            lambda: StateTransfer({"a": a}, {"b": b}, recipe={"b": cat("a", "nothing")}),
            RecipeError,
            ("'b' is made of 'nothing', but no source has such a name",),
        ),
        (
            lambda: StateTransfer({"a": a}, {"b": b}, recipe={"b": cat("a")} if odd else {"b": cat("a", dim=1)}),
            RankMismatchError,
            ("recipe",),
        ),
        (lambda: StateTransfer({"a": a}, {"a": b}, max_bytes=0), ValueError, ("max_bytes",)),
        (lambda: StateTransfer({0 if odd else "a": a}, {"a": b}), StateMismatchError, ("names", "strings; found 0")),
        (
            lambda: StateTransfer({"a": a}, {"a": chunks(0, 0, 7).layout(PLAIN.shape)}, on_arrival=print),
            StateMismatchError,
            ("'a' has boxes on rank 7, which does not take part",),
        ),
        (
            lambda: StateTransfer({"a": a}, {"a": b}, recipe=["a"] if odd else None),
            RecipeError,
            ("a recipe is a mapping from names of the target, not ['a']",),
        ),
        (
            lambda: StateTransfer({"a": a}, {"a": b}, rename={"a": 5} if odd else None),
            RecipeError,
            ("rename is a function, or a mapping from names to names, not {'a': 5}",),
        ),
        (
            lambda: StateTransfer({"a": a}, {"a": b}, rename=lambda name: None),  # type: ignore[return-value] # wrong
            RecipeError,
            ("rename makes None of 'a', and not a name",),
        ),
        (
            lambda: StateTransfer({"a": a}, {"a": b}, on_arrival=5 if odd else None),
            ValueError,
            ("on_arrival should be a function of a name and boxes, not 5",),
        ),
        (
            lambda: StateTransfer({"a": a, "b": other}, {"a": other, "b": a}),
            StateMismatchError,
            ("of the target are in the same memory on rank 0",),
        ),
    ]
    for make, kind, words in wrong:
        said = message_everywhere(make, kind)
        assert all(word in said for word in words), said
    StateTransfer({"a": a, "b": other}, {"a": b, "b": other}).run()  # onto itself
    assert holds(b, PLAIN)
    assert holds(other, PLAIN)


@ranks(4)
def test_a_rank_that_fails_in_the_middle() -> None:
    """In on_arrival, for lack of memory, or in another verb: every rank raises soon, and all can go on."""
    a, b = sharded(), sharded(COLUMNS)
    layout = b.sharding

    def refuse(name: str, boxes: list[torch.Tensor]) -> None:
        if dist.get_rank() == 3 and refusing:
            raise ValueError(f"no room for {name}")

    with impatient():
        for staged in (False, True):
            for wait in (True, False):
                refusing = True
                transfer = StateTransfer(
                    {"a": a}, {"a": layout} if dist.get_rank() > 1 else {}, on_arrival=refuse, staged=staged
                )
                assert message_everywhere(partial(run, transfer, wait), ValueError) == "no room for a"
                refusing = False
                transfer.run()
        for where, name in ((rounds.Rounds, "prepare"), (Load, "of")):
            with pytest.MonkeyPatch.context() as patch:
                if dist.get_rank() == ODD:
                    patch.setattr(where, name, _no_memory)
                said = message_everywhere(lambda: StateTransfer({"a": a}, {"a": b}), RuntimeError)
                assert said.endswith("no memory")
        transfer = StateTransfer({"a": a}, {"a": b})
        b.zero_()
        transfer.run()
        assert holds(b, PLAIN)
        everywhere = torch.zeros(8, 6)
        transfer = StateTransfer({"a": a}, {"a": everywhere})  # every rank waits for every other
        said = message_everywhere(a.full_tensor if dist.get_rank() == ODD else transfer.run, RankMismatchError)
        assert "StateTransfer.run" in said
        assert "full_tensor" in said
        transfer.run()
        assert torch.equal(everywhere, PLAIN)


class Interrupted(BaseException):
    """What is no `Exception`, as KeyboardInterrupt and SystemExit are not."""


@ranks(4)
def test_a_rank_that_is_interrupted() -> None:
    """It raises what it was interrupted by, also from the background; the others an error, and all can go on."""
    a, layout = sharded(), chunks(1, 0, 1, 2, 3).layout(PLAIN.shape)
    odd = dist.get_rank() == ODD

    def interrupt(name: str, boxes: list[torch.Tensor]) -> None:
        if odd and interrupting:
            raise Interrupted

    with impatient():
        for staged in (False, True):
            transfer = StateTransfer({"a": a}, {"a": layout}, on_arrival=interrupt, staged=staged)
            for wait in (True, False):
                interrupting = True
                with pytest.raises(Interrupted if odd else TransferError) as caught:
                    run(transfer, wait)
                assert odd or "rank 1 was interrupted in the middle of a transfer, by Interrupted" in str(caught.value)
                interrupting = False
                shardwise.check()
                transfer.run()


@ranks(2)
def test_runs_in_several_threads_take_turns() -> None:
    """They share buffers; and a run that is called by a run, which it would wait for, is an error."""
    source, target = sharded(chunks(0, 0, 1)), sharded(chunks(1, 0, 1))
    transfer = StateTransfer({"a": source}, {"a": target}, max_bytes=1)
    with ThreadPoolExecutor(3) as threads:
        target.zero_()
        for each in [threads.submit(transfer.run) for _ in range(6)]:
            each.result()
    assert transfer.version == 6
    assert holds(target, PLAIN)
    handle = transfer.run(wait=False)
    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(handle.wait) for _ in range(2)]:
            each.result()
    with pytest.raises(ValueError, match=r"a version should be an int, not 1\.5"):
        transfer.run(version=1.5)  # type: ignore[call-overload] # wrong
    layout = chunks(1, 0, 1).layout(PLAIN.shape)
    nested = StateTransfer({"a": source}, {"a": layout}, on_arrival=lambda *_: nested.run())
    for wait in (True, False):
        with pytest.raises(TransferError, match=r"run\(\) was called by on_arrival"):
            run(nested, wait)


@ranks(2)
def test_transfers_that_are_alike_are_told_apart() -> None:
    """Two of the same names and layouts, of which one rank runs, or waits for, the other one first."""
    for staged in (False, True):
        targets = [shardwise.zeros(chunks(1, 0, 1), 8, 6) for _ in range(2)]
        both = [StateTransfer({"a": sharded(chunks(0, 0, 1))}, {"a": each}, staged=staged) for each in targets]
        begun = [partial(run, transfer, True) for transfer in both]
        if staged:
            begun = [transfer.run(wait=False).wait for transfer in both]
        with impatient(), pytest.raises(RankMismatchError, match="identity"):
            begun[dist.get_rank()]()
        changed = [bool(target.full_tensor().any()) for target in targets]
        assert not staged or not any(changed)  # without it, what a rank has itself is in its place


def run(transfer: StateTransfer, wait: bool) -> None:
    """In either way."""
    if wait:
        transfer.run()
    else:
        transfer.run(wait=False).wait()


def _no_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("no memory")


def dies_on_the_way() -> None:
    """Rank 2 ends when its first messages have come."""
    source, target = shardwise.ones(ROWS, 2048, 2048), shardwise.zeros(chunks(1, 3, 2, 1, 0), 2048, 2048)
    transfer = StateTransfer({"a": source}, {"a": target}, max_bytes=2**20)
    if dist.get_rank() == 2:
        rounds.Rounds.finish = lambda self, *args: (self.under_way[0].wait(), os._exit(1))
    with pytest.raises(TransferError, match=r"could not exchange .*bytes of a state.*rank 2 is gone"):
        transfer.run()


def test_a_rank_that_dies_is_an_error_on_the_others() -> None:
    """Without waiting for the time limit."""
    others_go_on(dies_on_the_way, dies=2)


@pytest.mark.parametrize("staged", [False, True])
@ranks(4)
def test_whoever_cannot_take_it_in(staged: bool) -> None:
    """If one rank fails with what it is handed, staged targets are as they were on all ranks; others have changed, as
    autograd knows."""
    source = {"a": shardwise.ones(ROWS, 64, 64), "z": shardwise.ones(ROWS, 4, 4)}
    weight = torch.zeros(64, 64, requires_grad=True)
    target = {"a": weight, "z": ROWS.layout((4, 4))}

    def fail(name: str, boxes: list[torch.Tensor]) -> None:
        if dist.get_rank() == 1:
            raise ValueError("no room")

    transfer = StateTransfer(source, target, on_arrival=fail, staged=staged, max_bytes=2**12)
    product = (weight * torch.ones(64, 64, requires_grad=True)).sum()
    with pytest.raises((ValueError, TransferError), match="no room"):
        transfer.run()
    if staged:
        assert not weight.any()
        product.backward()
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
    for _ in range(3):  # messages that nobody waited for are not in the way of others
        shardwise.check()


@ranks(2)
def test_memory_that_has_moved_is_not_sent() -> None:
    """A tensor that lies elsewhere on one rank than when the transfer was made is an error on both, and not stale."""
    source, target = shardwise.ones(chunks(0, 0, 1), 8, 8), shardwise.zeros(chunks(1, 0, 1), 8, 8)
    transfer = StateTransfer({"a": source}, {"a": target})
    transfer.run()
    if dist.get_rank() == 1:
        source.local_shards()[0].tensor = torch.full((4, 8), 5.0)
    with pytest.raises(StateMismatchError, match=r"'a' of the source is not where it was.*make the StateTransfer anew"):
        transfer.run()
    StateTransfer({"a": source}, {"a": target}).run()
    assert torch.equal(target.full_tensor(), torch.cat([torch.ones(4, 8), torch.full((4, 8), 5.0)]))


@ranks(2)
def test_a_run_that_fails_on_one_rank_alone() -> None:
    """When the other has all that it wants: both raise it, and can run it again."""
    source, target = sharded(chunks(0, 0, 1)), shardwise.zeros(chunks(1, 0, 1), 8, 6)
    transfer = StateTransfer({"a": source}, {"a": target})

    def fail(self: rounds.Rounds, *_: object) -> None:
        for waiting in self.under_way:
            waiting.wait()
        raise ValueError("no room")

    with impatient(), pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == ODD:
            patch.setattr(rounds.Rounds, "finish", fail)
        with pytest.raises(ValueError, match="no room"):
            transfer.run()
    transfer.run()
    assert holds(target, PLAIN)
    assert transfer.version == 1
    with impatient(), pytest.raises(RankMismatchError, match="version=5 on rank 0, version=6 on rank 1"):
        transfer.run(version=5 + dist.get_rank())


@ranks(4)
def test_a_run_that_fails_on_a_rank_which_nobody_waits_for() -> None:
    """All ranks raise in the same run, so whoever catches it and goes on is in step: versions are not mixed."""
    source, mine = sharded(), sharded(chunks(0, 2, 3))
    served: dict[str, Any] = {"a": mine}
    transfer = StateTransfer({"a": source}, served)
    with impatient():
        for step in range(1, 5):
            source.fill_(step)
            served["a"] = PLAIN if step == 2 and dist.get_rank() == 3 else mine
            if step == 2:
                assert "not where it was" in message_everywhere(transfer.run, StateMismatchError)
            else:
                transfer.run()
                assert all((shard.tensor == step).all() for shard in mine.local_shards())
    assert transfer.version == 3
