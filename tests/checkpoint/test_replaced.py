"""A checkpoint that is replaced while it is loaded, in a store that holds no files open: one whole state, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import chunks
from tests.checkpoint.storages import Unheld

import shardwise
from shardwise import zeros
from shardwise.checkpoint import filling
from shardwise.checkpoint.archive import archive
from shardwise.checkpoint.archive.index_file import INDEX
from shardwise.errors import DamageError, StateMismatchError
from shardwise.testing import ranks


def alone() -> Any:
    """A group of this rank alone, as a job of its own has it."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def numbered(number: int, make: Any = lambda value: torch.full((40, 50), value)) -> dict[str, Any]:
    """A state all of whose values tell which it is."""
    return {"parts": [make(float(number)) for _ in range(5)], "number": number}


def replaced_once(patch: pytest.MonkeyPatch, replace: Any, after: int) -> None:
    """Between two reads of the first load on the first rank, replace the checkpoint."""
    real, count = archive.Archive.fill_located, 0

    def filled(self: Any, located: Any, **options: Any) -> None:
        nonlocal count
        for one in located:
            if count == after:
                replace()
            count += 1
            real(self, [one], **options)

    patch.setattr(archive.Archive, "fill_located", filled)


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("relays", [False, True])
@ranks(2)
def test_a_load_from_a_store_that_holds_no_files_open(tmp_path: Path, after: int, relays: bool) -> None:
    """Replaced between any two reads of one rank: all ranks have the new one, whole."""
    path, own = Unheld(tmp_path / "checkpoint"), alone()
    shardwise.save(numbered(1), path)
    sharded = zeros(chunks(1, 1, 0), 40, 50)
    state = numbered(0, lambda _: sharded.clone())

    def replace() -> None:
        shardwise.save(numbered(2), path, process_group=own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filling, "is_relayed", lambda *_, **__: relays)
        if dist.get_rank() == 0:
            replaced_once(patch, replace, after)
        shardwise.load(state, path)
    assert state["number"] == 2
    assert all((part.local_tensor() == 2).all() for part in state["parts"])


@ranks(2)
def test_a_load_from_such_a_store_that_cannot_go_on(tmp_path: Path) -> None:
    """Replaced by a state of another form, or damaged: every rank raises, and says what its tensors are."""
    own, sharded = alone(), zeros(chunks(1, 1, 0), 40, 50)
    for number, (says, kind) in enumerate(
        [("replaced while it was loaded, by a checkpoint", StateMismatchError), ("is damaged", DamageError)]
    ):
        path = Unheld(tmp_path / str(number))
        shardwise.save(numbered(1), path)

        def replace(path: Unheld = path, number: int = number) -> None:
            if number:
                path.remove(name for name in path.names() if name != INDEX)
            else:
                shardwise.save({"other": 1}, path, process_group=own)

        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 0:
                replaced_once(patch, replace, 2)
            state = numbered(0, lambda _: sharded.clone())
            with pytest.raises(kind, match=says):
                shardwise.load(state, path)
        assert state["number"] == 0
        shardwise.check()


def test_a_load_from_memory_that_is_replaced() -> None:
    """Of a process alone."""
    address = "memory://replaced/while/loading"
    shardwise.save(numbered(1), address)
    state = numbered(0)
    with pytest.MonkeyPatch.context() as patch:
        replaced_once(patch, lambda: shardwise.save(numbered(2), address), 2)
        shardwise.load(state, address)
    assert state["number"] == 2
    assert all((part == 2).all() for part in state["parts"])
