"""`shardwise reshard`: what ranks with other layouts would have written, at paths and URLs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases import chunks
from tests.tools.cli.states import Cli, holds, plain_state

import shardwise
from shardwise import zeros
from shardwise.checkpoint.archive import Archive, open_archive
from shardwise.layout.specs import ChunkShardingSpec
from shardwise.testing import run_on_ranks


def load_on_ranks(path: str) -> None:
    """Load on other ranks than those that it was written for, and compare."""
    plain = plain_state()["model"]
    target = {"layers.0.weight": zeros(chunks(1, 0, 1), 40, 24), "layers.1.weight": zeros(chunks(0, 0, 1), 24, 40)}
    shardwise.load({"model": target}, path, strict=False)
    assert torch.equal(target["layers.0.weight"].full_tensor(), plain["layers.0.weight"])
    assert torch.equal(target["layers.1.weight"].full_tensor(), plain["layers.1.weight"])


def test_reshard_writes_what_ranks_with_these_layouts_would(
    cli: Cli, saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File by file the same boxes; nothing larger than the limit is read at a time, and any job can load it."""
    read: list[int] = []
    read_box = Archive.read_box

    def noted(self: Archive, *args: Any, **options: Any) -> torch.Tensor:
        made = read_box(self, *args, **options)
        read.append(made.nbytes)
        return made

    monkeypatch.setattr(Archive, "read_box", noted)
    plan = {
        "model/layers.0.weight": 1,
        "*bias": None,
        "model/layers.1.*": {"dim": 0, "weights": [2, 1, 1, 1, 1, 1, 1, 0]},
    }
    Path("plan.json").write_text(json.dumps(plan))
    code, _, err = cli("reshard", saved, "eight", "--ranks", "8", "--plan", "plan.json", "--max-memory", "1KB")
    assert (code, err, max(read) <= 1000) == (0, "", True)
    holds("eight", plain_state())
    run_on_ranks(2, load_on_ranks, os.path.abspath("eight"))
    with open_archive("eight") as archive:
        layout = archive.index.tensors["model/layers.0.weight"].layout
        wanted = ChunkShardingSpec(1, [f"rank:{rank}/cpu" for rank in range(8)]).layout((40, 24))
        assert layout == wanted
        weighted = archive.index.tensors["model/layers.1.weight"].layout
        assert [weighted.extent(row)[0] for row in range(8)] == [6, 3, 3, 3, 3, 3, 3, 0]
    assert cli("verify", "eight")[0] == 0
    Path("plan.json").write_text('{"model/*weight": [1, 0], "*": [null, 0]}')
    assert cli("reshard", saved, "mesh", "--mesh", "2x3", "--plan", "plan.json")[0] == 0
    holds("mesh", plain_state())
    assert "2 × 3 grid" not in cli("inspect", "mesh", "--only", "*.bias")[1]
    assert "3 × 2 grid" in cli("inspect", "mesh", "--only", "*.weight")[1]
    assert cli("reshard", saved, "mesh", "--ranks", "1")[0] == 2
    assert cli("reshard", saved, "mesh", "--ranks", "1", "--overwrite")[0] == 0
    assert sorted(os.listdir("mesh"))[0] == "index.json"
    assert len(os.listdir("mesh")) == 2  # the older files are gone
    holds("mesh", plain_state())


def test_checkpoints_at_urls_are_read_and_written(cli: Cli, saved: str) -> None:
    """As at paths; what is there is not replaced unasked."""
    url = "memory://cli/new"
    assert cli("reshard", saved, url, "--ranks", "2")[0] == 0
    assert cli("diff", saved, url)[0] == 0
    assert cli("verify", url)[0] == 0
    assert "--overwrite" in cli("reshard", saved, url, "--ranks", "3")[2]
    assert cli("reshard", saved, url, "--ranks", "3", "--overwrite")[0] == 0
    assert len(json.loads(cli("inspect", url, "--json")[1])["files"]) == 3
    for options, code in (((), 0), ((), 2), (("--overwrite",), 0)):
        assert cli("extract", url, "scale", "memory://cli/one.safetensors", *options)[0] == code
    assert json.loads(cli("inspect", "memory://cli/one.safetensors", "--json")[1])["nbytes"] == 8
    assert "local paths only" in cli("convert", url, "memory://cli/x.pt", "--to", "torch")[2]
