"""Memory of both sides: what may be shared by several tensors, and what is told before anything moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import chunks, holds

import shardwise
from shardwise import StateTransfer
from shardwise.errors import StateMismatchError
from shardwise.state_transfer import pad, take
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

PLAIN = torch.arange(48.0).reshape(8, 6)
ROWS = chunks(0, 0, 1)


@ranks(2)
def test_targets_that_share_memory() -> None:
    """Elements that would have two values are an error on every rank, if only one rank has them; also where they
    would be read only later. Columns of one matrix are apart."""
    a, b = shard_tensor(PLAIN, ROWS), shard_tensor(PLAIN * 2, ROWS)
    odd = dist.get_rank() == 1

    def two(one: torch.Tensor, other: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": one, "b": other} if odd else {"a": torch.empty(8, 6), "b": torch.empty(8, 6)}

    wrong: list[tuple[Callable[[], dict[str, torch.Tensor]], str]] = [
        (lambda: two(memory[:8], memory[4:]), "'a' and 'b' of the target are in the same memory on rank 1"),
        (lambda: two(memory[:8], memory[:8]), "'a' and 'b' of the target are in the same memory on rank 1"),
        (lambda: two(memory[:8], memory.as_strided((8, 6), (1, 8))), "are in the same memory on rank 1"),
        (
            lambda: two(memory[:1].expand(8, 6), memory[4:]),
            "'a' of the target has elements that share memory on rank 1",
        ),
        (
            lambda: two(memory.as_strided((8, 6), (1, 1)), memory[4:]),
            "'a' of the target has elements that share memory",
        ),
    ]
    for staged in (False, True):
        memory = torch.full((12, 6), -1.0)
        for make, words in wrong:
            with pytest.raises(StateMismatchError, match=words):
                StateTransfer({"a": a, "b": b}, make(), staged=staged)
        assert bool((memory == -1).all())
        columns = torch.zeros(8, 12)
        transfer = StateTransfer({"a": a, "b": b}, {"a": columns[:, :6], "b": columns[:, 6:]}, staged=staged)
        transfer.run()
        assert torch.equal(columns, torch.cat([PLAIN, PLAIN * 2], 1))
        rows = torch.zeros(16, 6)
        StateTransfer({"a": a, "b": b}, {"a": rows[::2], "b": rows[1::2]}, staged=staged).run()
        assert torch.equal(rows, torch.stack([PLAIN, PLAIN * 2], 1).flatten(0, 1))


@ranks(2)
def test_memory_of_both_sides() -> None:
    """What is staged may be written over its own source, as the rest may if they only come close to each other."""
    a, b = shard_tensor(PLAIN, ROWS), shard_tensor(PLAIN * 2, ROWS)
    with pytest.raises(StateMismatchError, match=r"of the source and '.' of the target are in .*staged=True"):
        StateTransfer({"a": a, "b": b}, {"a": b, "b": a})
    transfer = StateTransfer({"a": a, "b": b}, {"a": b, "b": a}, staged=True)
    for step in range(1, 3):
        transfer.run()
        assert holds(a, PLAIN * (1 + step % 2))
        assert holds(b, PLAIN * (2 - step % 2))
    columns = torch.cat([PLAIN, PLAIN * 0], 1)
    StateTransfer({"a": columns[:, :6]}, {"a": columns[:, 6:]}).run()
    assert torch.equal(columns, torch.cat([PLAIN, PLAIN], 1))


@ranks(2)
def test_ties_on_one_rank_alone() -> None:
    """A rank that gives a layout is handed each name of what is tied elsewhere; memory that only one rank has for both
    names is filled, if that is with the same; names may be empty, and are not taken for zeros."""
    a = shard_tensor(PLAIN, chunks(1, 0, 1))
    odd = dist.get_rank() == 1
    tied = shardwise.zeros(ROWS, 8, 6)
    got: list[tuple[str, list[float]]] = []
    target: dict[str, Any] = dict.fromkeys(("", "b"), tied.sharding if odd else tied)
    source = {"": a, "b": a}
    StateTransfer(source, target, on_arrival=lambda name, boxes: got.append((name, boxes[0].tolist()))).run()
    assert sorted(got) == ([("", PLAIN[4:].tolist()), ("b", PLAIN[4:].tolist())] if odd else [])
    assert odd or holds(tied, PLAIN)
    one, other = torch.zeros(8, 6), torch.zeros(8, 6)
    StateTransfer(source, {"": one, "b": other if odd else one}).run()
    assert torch.equal(one, PLAIN)
    assert not odd or torch.equal(other, PLAIN)
    padded = torch.full((9, 6), -1.0)
    recipe = {"c": pad(take("b")[:], 9)}
    StateTransfer(source, {"": one.zero_(), "c": padded}, recipe=recipe).run()
    assert torch.equal(one, PLAIN)
    assert torch.equal(padded, torch.cat([PLAIN, torch.zeros(1, 6)]))
