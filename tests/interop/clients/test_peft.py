"""peft: LoRA adapters on sharded layers, put on before the sharding or after it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from tests.interop.clients.models import (
    COLUMNS,
    ROWS,
    llama,
    same_gradients,
    same_parameters,
    sharded,
    token_ids,
    whole,
)

from shardwise import ShardedTensor, ShardingPlan, from_local, gather_budget, shard_module
from shardwise.errors import CheckpointError
from shardwise.testing import ranks

IDS = token_ids()
# The layers of peft have the weight a step further down; adapters are cut as their layers are.
PLAN = {
    "**.embed_tokens.weight": ROWS,
    "**.[qkv]_proj.base_layer.weight": ROWS,
    "**.[qkv]_proj.lora_B.default.weight": ROWS,
    "**.down_proj.base_layer.weight": COLUMNS,
    "**.down_proj.lora_A.default.weight": COLUMNS,
}


def with_adapters(model: Any) -> Any:
    """The model with adapters that change something from the beginning, the same on every rank."""
    torch.manual_seed(3)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=names, init_lora_weights=False))


def twins(before: bool) -> tuple[Any, Any]:
    """A model with adapters in pieces, and its plain twin."""
    if before:
        return shard_module(with_adapters(llama()), ShardingPlan(PLAN)), with_adapters(llama())
    return with_adapters(sharded(llama())), with_adapters(llama())


@pytest.mark.parametrize("before", [True, False])
@ranks(2)
def test_adapters_train_as_those_of_the_twin(before: bool) -> None:
    """The base is frozen, the gradients of adapters are the twin's, with one batch for all and with each rank's own."""
    model, plain = twins(before)
    trained = [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
    assert trained
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trained
    assert any(isinstance(p, ShardedTensor) for p in model.parameters() if p.requires_grad) == before
    plain(input_ids=IDS, labels=IDS).loss.backward()
    for ids in (IDS, from_local(IDS.chunk(2)[dist.get_rank()])):
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        same_gradients(model, plain)
    for one in (model, plain):
        torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1).step()
    same_parameters(model, plain)


@pytest.mark.parametrize("before", [True, False])
@ranks(2)
def test_adapters_are_merged_into_sharded_weights(before: bool) -> None:
    """`merge_and_unload` gives the model without adapters, sharded as it was."""
    model, plain = (one.merge_and_unload() for one in twins(before))
    same_parameters(model, plain)
    assert model.model.layers[0].self_attn.q_proj.weight.sharding_spec() == ROWS
    torch.testing.assert_close(whole(model(input_ids=IDS).logits), plain(input_ids=IDS).logits.detach())


@pytest.mark.parametrize("before", [True, False])
@ranks(2)
def test_adapters_are_saved_whole(tmp_path: Path, before: bool) -> None:
    """The files that peft writes of the twin, which it reads into a plain model and into one in pieces."""
    model, plain = twins(before)
    model.save_pretrained(tmp_path / "ours", is_main_process=dist.get_rank() == 0)
    if dist.get_rank() == 0:
        plain.save_pretrained(tmp_path / "theirs")
    dist.barrier()
    assert sorted(os.listdir(tmp_path / "ours")) == sorted(os.listdir(tmp_path / "theirs"))
    ours, theirs = (load_file(tmp_path / side / "adapter_model.safetensors") for side in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    again = PeftModel.from_pretrained(sharded(llama()), tmp_path / "ours")
    torch.testing.assert_close(whole(again(input_ids=IDS).logits), plain(input_ids=IDS).logits.detach())


@ranks(2)
def test_large_sharded_adapters_are_not_gathered_unasked(tmp_path: Path) -> None:
    """One line on every rank, with the call that allows it."""
    model, _ = twins(before=True)
    with gather_budget(64), pytest.raises(CheckpointError, match=r"save within shardwise\.gather_budget\(\d+\)"):
        model.save_pretrained(tmp_path, is_main_process=dist.get_rank() == 0)
