"""The files of one save: when the index may speak of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardwise
from shardwise.checkpoint.storage import LocalStorage
from shardwise.errors import CheckpointError


def test_a_list_that_is_out_of_date(tmp_path: Path) -> None:
    """Network file systems keep lists for a while: a file that can be opened is there; one that cannot is not."""
    state = {"weight": torch.arange(6.0)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStorage, "names", lambda self: [])
        shardwise.save(state, tmp_path / "a")
        patch.setattr(LocalStorage, "write", lambda self, name, buffers: [bytes(each) for each in buffers])
        with pytest.raises(CheckpointError, match="the first rank does not see it"):
            shardwise.save(state, tmp_path / "b")
    assert torch.equal(shardwise.load({"weight": torch.zeros(6)}, tmp_path / "a")["weight"], state["weight"])
    assert not (tmp_path / "b").exists()
