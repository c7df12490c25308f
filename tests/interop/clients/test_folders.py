"""Folders of Hugging Face: models in pieces are written and read as transformers writes and reads them."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.cases import ALL, KINDS, PLAIN
from tests.interop.clients.models import PLAN, ROWS, config, llama, same_parameters, sharded, twins, whole
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from shardwise import ReplicatedShardingSpec, ShardedTensor, ShardingPlan, fill_buffers, load, save, shard_module
from shardwise.errors import CheckpointError, PropertyError, StateMismatchError
from shardwise.interop import huggingface
from shardwise.interop.huggingface import files
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("max_shard_size", ["50GB", "5KB"])
@ranks(2)
def test_transformers_reads_what_ranks_wrote_together(tmp_path: Path, tied: bool, max_shard_size: str) -> None:
    """One file, or many and an index: the same files with the same tensors as transformers writes of the twin."""
    model, plain = twins(tied)
    huggingface.save_pretrained(model, tmp_path / "ours", max_shard_size=max_shard_size)
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_size)
        ours, theirs = (sorted(os.listdir(tmp_path / side)) for side in ("ours", "theirs"))
        assert ours == theirs
        for name in ours:
            if name.endswith(".json"):
                both = [json.loads((tmp_path / side / name).read_text()) for side in ("ours", "theirs")]
                assert both[0] == both[1], name
            else:
                both = [load_file(tmp_path / side / name) for side in ("ours", "theirs")]
                assert both[0].keys() == both[1].keys()
                assert all(torch.equal(both[0][key], both[1][key]) for key in both[0])
    dist.barrier()
    same_parameters(AutoModelForCausalLM.from_pretrained(tmp_path / "ours").to(torch.float64), plain)


class Table(nn.Module):
    """One parameter of any layout, and two small plain ones."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.table = nn.Parameter(shard_tensor(PLAIN, ALL[kind]))
        self.bias, self.empty = nn.Parameter(torch.arange(5.0)), nn.Parameter(torch.ones(0, 3))


@pytest.mark.parametrize("kind", [*KINDS, "chunk dim -1", "uneven grid"])
@ranks(4)
def test_any_layout_is_written_in_the_order_of_the_file(tmp_path: Path, kind: str) -> None:
    """Boxes that are stretches of the file as they lie, others after they were moved, in rounds of a few elements."""
    model = Table(kind)
    with mock.patch.object(files, "PIECE", 8):  # bytes: two elements a rank at a time
        huggingface.save_pretrained(model, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert sorted(found) == ["bias", "empty", "table"]
    assert torch.equal(found["table"], PLAIN)
    assert torch.equal(found["bias"], torch.arange(5.0))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    huggingface.load_pretrained(model, tmp_path)
    assert torch.equal(whole(model.table), PLAIN)
    assert torch.equal(model.bias.detach(), torch.arange(5.0))


@ranks(2)
def test_a_model_saves_itself(tmp_path: Path) -> None:
    """`model.save_pretrained` writes the same folder, in the place of an older one; other files stay."""
    model, plain = twins(tied=True)
    if dist.get_rank() == 0:
        llama().save_pretrained(tmp_path, max_shard_size="5KB")
        (tmp_path / "README.md").write_text("mine")
    dist.barrier()
    model.save_pretrained(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    same_parameters(AutoModelForCausalLM.from_pretrained(tmp_path).to(torch.float64), plain)
    with pytest.raises(CheckpointError, match=r"variant=.*shardwise\.huggingface\.save_pretrained"):
        model.save_pretrained(tmp_path, variant="fp16")


@ranks(2)
def test_if_a_rank_cannot_write_all_raise_and_older_weights_stay(tmp_path: Path) -> None:
    """The same error on every rank, and nothing is left behind."""
    model, _ = twins()
    huggingface.save_pretrained(model, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    dist.barrier()
    write = huggingface.folder.Folder.write

    def failing(self: Any, name: str, parts: Any) -> None:
        if dist.get_rank() == 1:
            raise CheckpointError("the disk is full")
        write(self, name, parts)

    with (
        mock.patch.object(huggingface.folder.Folder, "write", failing),
        pytest.raises(CheckpointError, match=r"the disk is full\n\(found on rank 1"),
    ):
        huggingface.save_pretrained(model, tmp_path)
    dist.barrier()
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["config.json", "generation_config.json", "model.safetensors"]


@ranks(2)
def test_what_a_folder_cannot_hold_is_refused() -> None:
    """A size without a meaning, a dtype that the format has no word for: one line on every rank."""
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"such as '5GB'; found 'much'"):
        huggingface.save_pretrained(model, "nowhere", max_shard_size="much")
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(CheckpointError, match=r"'phase' is torch.complex64, for which safetensors has no word"):
        huggingface.save_pretrained(model, "nowhere")
    assert not Path("nowhere").exists()


def on_meta(tied: bool = False) -> Any:
    """The model without data; then its matrices, and only those, sharded."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config(tied))
    return sharded(model)


@pytest.mark.parametrize("tied", [False, True])
@ranks(2)
def test_a_model_from_meta_is_filled_from_a_folder(tmp_path: Path, tied: bool) -> None:
    """Each rank reads its boxes; norms and rotary buffers are made; values are converted to the model's dtype."""
    plain = llama(tied)
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path, max_shard_size="5KB")
    dist.barrier()
    model = on_meta(tied)
    huggingface.load_pretrained(model, tmp_path)
    assert isinstance(model.lm_head.weight, ShardedTensor)
    assert model.lm_head.weight.dtype == torch.float32
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    same_parameters(model, copy.deepcopy(plain).float())
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    twin = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(model.model.rotary_emb.inv_freq, twin.model.rotary_emb.inv_freq)
    if hasattr(twin.model.rotary_emb, "original_inv_freq"):
        assert torch.equal(model.model.rotary_emb.original_inv_freq, twin.model.rotary_emb.original_inv_freq)


@ranks(2)
def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    """All that does not fit in one error, on every rank, before anything is changed."""
    if dist.get_rank() == 0:
        llama().model.save_pretrained(tmp_path / "base")
        save_file({"other.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    dist.barrier()
    model = on_meta()
    with pytest.raises(StateMismatchError, match=r"missing in the folder: model\.embed_tokens.*\n.*not in the model"):
        huggingface.load_pretrained(model, tmp_path)
    with pytest.raises(StateMismatchError, match=r"missing in the folder: lm_head\.weight\n"):
        huggingface.load_pretrained(model, tmp_path / "base")
    assert model.model.norm.weight.is_meta
    with pytest.raises(CheckpointError, match=r"holds no file that ends with '\.safetensors'"):
        huggingface.load_pretrained(model, tmp_path / "nothing")


@ranks(2)
def test_pretrained_models_are_sharded_as_they_are(tmp_path: Path) -> None:
    """`from_pretrained` on every rank, then `shard_module`."""
    plain = llama()
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path)
    dist.barrier()
    same_parameters(sharded(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)), plain)


@ranks(2)
def test_buffers_that_no_checkpoint_holds_are_named_and_filled(tmp_path: Path) -> None:
    """A load into a model whose rotary buffers are on meta raises, on every rank; filled, the model is the twin."""
    everything = ReplicatedShardingSpec(["rank:0/cpu", "rank:1/cpu"])
    plan = ShardingPlan({"**.*norm.weight": everything, **PLAN, "lm_head.weight": ROWS})
    plain = llama().float()
    save(plain, tmp_path / "checkpoint")
    with torch.device("meta"):
        model = LlamaForCausalLM(config())
    shard_module(model, plan)
    with pytest.raises(PropertyError, match=r"'model\.rotary_emb\.inv_freq'.*stay on meta.*shardwise\.fill_buffers"):
        load(model, tmp_path / "checkpoint")
    state = torch.get_rng_state()
    fill_buffers(model, lambda: LlamaForCausalLM(config()))
    assert torch.equal(torch.get_rng_state(), state)
    load(model, tmp_path / "checkpoint")
    same_parameters(model, plain)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, dict(plain.named_buffers())[name]), name
    model.to_empty(device="cpu")  # now all of it is garbage
    model.model.rotary_emb.inv_freq.fill_(7)
    fill_buffers(model, lambda: LlamaForCausalLM(config()))
    assert torch.equal(model.model.rotary_emb.inv_freq, plain.model.rotary_emb.inv_freq)
    with pytest.raises(PropertyError, match=r"made anew has no values for 'model\.rotary_emb\.inv_freq'"):
        fill_buffers(model, lambda: nn.Linear(2, 2))
