"""Folders of many kinds of models: names that transformers converts, tied tables, models with several parts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tests.models.plans import columns, plan_of, rows, uneven
from tests.models.twins import sharded, whole
from tests.models.zoo import ZOO, made

from shardwise import shard_module
from shardwise.interop import huggingface
from shardwise.testing import ranks

CUTS = {"rows": rows, "columns": columns, "uneven": uneven}


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder."""
    found: dict[str, torch.Tensor] = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            found |= load_file(folder / name)
    return found


@pytest.mark.parametrize(("name", "cut"), [(name, ("columns", "uneven")[k % 2]) for k, name in enumerate(ZOO)])
@ranks(2)
def test_folders_are_those_that_transformers_writes_of_the_twin(tmp_path: Path, name: str, cut: str) -> None:
    """The same names, sizes and values; and what transformers wrote fills a model in pieces."""
    plain = made(name)
    model = sharded(plain, CUTS[cut])
    model.save_pretrained(tmp_path / "ours")
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path / "theirs")
    dist.barrier()
    ours, theirs = files_of(tmp_path / "ours"), files_of(tmp_path / "theirs")
    assert sorted(ours) == sorted(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("name", ZOO)
@ranks(2)
def test_what_transformers_wrote_fills_a_model_in_pieces(tmp_path: Path, name: str) -> None:
    """Made on meta, cut by rows where it can be; the rest, and buffers that no folder holds, are made first."""
    plain = made(name)
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path, max_shard_size="10KB")
    dist.barrier()
    with torch.device("meta"):
        model = type(plain)(plain.config).double()
    shard_module(model, plan_of(model, lambda key, p: rows(key, p) if p.ndim > 1 else None))
    huggingface.load_pretrained(model, tmp_path)
    expected = plain.state_dict()
    assert model.state_dict().keys() == expected.keys()
    for key, value in model.state_dict().items():
        assert torch.equal(whole(value).detach(), expected[key]), key
    buffers = dict(plain.named_buffers())
    assert [key for key, _ in model.named_buffers()] == list(buffers)
    for key, value in model.named_buffers():
        assert torch.equal(value, buffers[key]), key
