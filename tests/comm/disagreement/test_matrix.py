"""Every public verb, where one rank does otherwise: with other arguments, or it raises, skips it, is late, dies.

All ranks raise the same error, in the verb or at their next meeting, and are in step again; or nobody notices, where
docs/limits.md says so. The table in verbs.py says which.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.comm.disagreement.given import (
    COLUMNS,
    ODD,
    PLAIN,
    ROWS,
    WORLD,
    backward_of,
    impatient,
    looked_for,
    rank,
    recorded,
)
from tests.comm.disagreement.verbs import VERBS, Verb, filed
from tests.deaths import all_are_heard

import shardwise
from shardwise.comm.agreement import in_step, in_step_sharing
from shardwise.comm.group import backend
from shardwise.comm.transfer import execute, rounds
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks
from shardwise.testing.pool import RankFailure, run_on_ranks

AFTERWARDS = 3  # verbs that a rank does at most until it raises


def world() -> Any:
    """The default group."""
    return dist.group.WORLD


def outcome(verb: Verb, fault: str, given: Any) -> str:
    """What this rank raises, in the verb or in those that come after it; 'nothing' if all of it goes well."""
    do = {"other": verb.other, "bad": verb.bad, "skips": lambda _: None}[fault] if rank() == ODD else verb.right
    assert do is not None
    try:
        do(given)
        for _ in range(1 if fault in verb.silent else AFTERWARDS):
            in_step(world(), lambda: (None, {"verb": "afterwards"}))
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n(found on")[0]
    return "nothing"


def faults(name: str, verb: Verb) -> list[str]:
    """What goes otherwise than it should if the odd rank does otherwise, in each way; every rank finds the same."""
    wrong = []
    for fault in ["skips"] + ["other"] * (verb.other is not None) + ["bad"] * (verb.bad is not None):
        found = outcome(verb, fault, verb.given())
        told = in_step_sharing(world(), lambda: (None, {"cell": f"{name}, {fault}"}, found))[1]  # noqa: B023 # called now
        if len(set(told)) > 1 or (told[0] == "nothing") != (fault in verb.silent):
            wrong.append(f"{name}, {fault}: {told}")
        print(f"{name} | {fault} | {told[0][:150]}")
    return wrong


@ranks(WORLD)
def test_one_rank_that_does_otherwise_stops_all(tmp_path: Path) -> None:
    """Whatever the verb; and then all are in step again."""
    shardwise.save({"x": shard_tensor(PLAIN, ROWS)}, tmp_path / "saved")
    verbs = {**VERBS, **filed(str(tmp_path))}
    with impatient():
        assert [line for name, verb in verbs.items() for line in faults(name, verb)] == []


@ranks(WORLD)
def test_strict_checks_find_it_before_anything_is_sent() -> None:
    """Ops and backwards that do not have headers else; the error is that of the headers."""
    names = ("matmul", "softmax", "sort, on gathered operands", "embedding", "cross_entropy", "backward", "a module")
    names += ("backward to a plain operand", "backward to replicas", "step with whole parameters", "unscale_")
    with shardwise.validation(strict=True):
        assert [line for name in names for line in faults(name, VERBS[name])] == []


@ranks(WORLD)
def test_one_rank_that_does_otherwise_stops_all_of_a_large_group() -> None:
    """Where digests are reduced: verbs that bring something, verbs that do not, and a backward meet one another."""
    names = ("from_local", "full_tensor", "sum", "a mask", "backward", "shard_module")
    with impatient(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "MOST_EACH", 1)
        assert [line for name in names for line in faults(name, VERBS[name])] == []


@ranks(WORLD)
def test_a_rank_that_is_late_is_waited_for() -> None:
    """Longer than it takes until the others look for word of it, in the forward and in the backward."""
    leaf, result = recorded()
    with looked_for() as be_late:
        if rank() == ODD:
            be_late()
        assert torch.equal(leaf.full_tensor(), PLAIN)
        if rank() == ODD:
            be_late()
        backward_of((leaf, result))
        assert torch.equal(leaf.grad.full_tensor(), torch.full_like(PLAIN, 2))


def die(*_: Any) -> Any:
    """As if the machine were switched off."""
    os.kill(os.getpid(), signal.SIGKILL)


def dies(where: str) -> None:
    """A transfer in which one rank dies: before the ranks agree, in the transfer, or in the backward."""
    leaf, result = recorded()
    if rank() == ODD:
        if where == "before":
            die()
        elif where == "exchange":
            execute.AllToAll._begin = die  # here alone, and for the last time
        elif where == "rounds":
            rounds.Rounds.start = die
        else:
            result.register_hook(die)
    if where in ("before", "exchange"):
        leaf.full_tensor()
    elif where == "rounds":
        leaf.detach().redistribute(COLUMNS, max_bytes=8)
    else:
        backward_of((leaf, result * 1))
    leaf.full_tensor()


@pytest.mark.parametrize("where", ["before", "exchange", "rounds", "backward"])
def test_a_rank_that_dies_is_named(where: str) -> None:
    """By all others, at once."""
    with all_are_heard(), pytest.raises(RankFailure) as caught:
        run_on_ranks(WORLD, dies, where, fresh=True)
    report = str(caught.value)
    assert "exit code -9" in report
    call = {"rounds": "redistribute", "backward": "a transfer in the backward"}.get(where, "full_tensor")
    place = r"\(.*(test_matrix|given)\.py:\d+\)"
    found = re.findall(rf"TransferError: in {call} {place}: rank [02] could not", report)  # here, or on another rank
    assert len(found) >= 2, report
    assert report.count(f": rank {ODD} is gone. torch says: ") >= 2
    assert "still running" not in report
