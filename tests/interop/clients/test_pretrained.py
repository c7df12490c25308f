"""`huggingface.load`: a folder's model, made in pieces, is what `from_pretrained` gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.interop.clients.models import config as llama_config
from tests.interop.clients.models import same_gradients, same_parameters, token_ids, whole
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedModel,
)

import shardwise
from shardwise import GridShardingSpec, ShardedTensor, ShardingPlan, plans
from shardwise.errors import CheckpointError, PlanKindError, StateMismatchError
from shardwise.huggingface import load
from shardwise.testing import ranks

SHARES = [3, 1]


def _llama(tied: bool = False) -> Any:
    return LlamaForCausalLM(llama_config(tied))


def _gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=4, n_positions=16))


def _bert() -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    return BertForMaskedLM(BertConfig(vocab_size=32, max_position_embeddings=16, **sizes))


MODELS = {"llama": _llama, "llama tied": lambda: _llama(tied=True), "gpt2": _gpt2, "bert": _bert}
UNEVEN = ShardingPlan({"**.weight": GridShardingSpec([0], ["rank:0/cpu", "rank:1/cpu"], weights=[SHARES])})
PLANS: dict[str, Any] = {
    "by name": "tensor_parallel",
    "uneven": UNEVEN,
    "a function": lambda model: plans.fully_sharded(model, weights=SHARES),
    "a dict": {"**.weight": 0},
    "gathered": plans.FullyShard(weights=SHARES),
}


def _save(model: PreTrainedModel, folder: Path, form: str) -> None:
    """By rank 0, as transformers does, or did."""
    if dist.get_rank() == 0:
        model.save_pretrained(folder, max_shard_size="8KB")
        if form == "bin":
            for file in folder.glob("*.safetensors*"):
                file.unlink()
            torch.save(model.state_dict(), folder / "pytorch_model.bin")
    dist.barrier()


def _made(kind: str) -> Any:
    torch.manual_seed(0)
    return MODELS[kind]().to(torch.float64)


def _same(ours: Any, theirs: Any) -> None:
    """Weights, buffers, settings, and what a step gives, in float64."""
    same_parameters(ours, theirs)
    buffers = dict(theirs.named_buffers())
    for name, buffer in ours.named_buffers():
        assert torch.equal(whole(buffer), buffers[name]), name
        assert buffer.dtype == buffers[name].dtype, name
    assert type(ours) is type(theirs)
    assert not ours.training
    assert ours.config.to_dict() == theirs.config.to_dict()
    if hasattr(theirs, "generation_config"):
        assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    ids = token_ids()
    logits, expected = (model(input_ids=ids).logits for model in (ours, theirs))
    torch.testing.assert_close(whole(logits), expected.detach())
    for scores in (logits, expected):
        scores.logsumexp(-1).mean().backward()
    same_gradients(ours, theirs)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", MODELS)
@ranks(2)
def test_a_loaded_model_is_that_of_from_pretrained(tmp_path: Path, kind: str, plan: str, form: str) -> None:
    """Tied or not, in even and uneven pieces or gathered block by block: values, buffers, scores and gradients."""
    plain = _made(kind)
    _save(plain, tmp_path, form)
    model = load(tmp_path, PLANS[plan])
    assert any(isinstance(one, ShardedTensor) for one in model.parameters())
    assert not any(one.is_meta for one in (*model.parameters(), *model.buffers()))
    _same(model, type(plain).from_pretrained(tmp_path))


@ranks(2)
def test_a_folder_of_several_files_of_torch_is_read_by_its_index(tmp_path: Path) -> None:
    """As older versions of transformers wrote them; `shardwise.load` takes such a folder too."""
    plain = _made("gpt2")
    if dist.get_rank() == 0:
        plain.config.save_pretrained(tmp_path)
        names = sorted(plain.state_dict())
        parts = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
        for file, part in parts.items():
            torch.save({name: plain.state_dict()[name] for name in part}, tmp_path / file)
        weight_map = {name: file for file, part in parts.items() for name in part}
        (tmp_path / "pytorch_model.bin.index.json").write_text(f'{{"weight_map": {weight_map}}}'.replace("'", '"'))
    dist.barrier()
    model = load(tmp_path, "rows", model_class=GPT2LMHeadModel, dtype=torch.float64)
    same_parameters(model, plain)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    shardwise.load(model, tmp_path)
    same_parameters(model, plain)
    if dist.get_rank() == 0:
        text = (tmp_path / "pytorch_model.bin.index.json").read_text()
        (tmp_path / "pytorch_model.bin.index.json").write_text(text.replace("lm_head", "arm_head"))
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"says that 'arm_head.weight' is in 'pytorch_model.*; it is not"):
        load(tmp_path, "rows", model_class=GPT2LMHeadModel)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "float16", "auto"])
@ranks(2)
def test_the_dtype_is_the_folders_unless_one_is_given(tmp_path: Path, dtype: Any) -> None:
    """As with `from_pretrained`; rotary tables stay in float32."""
    _save(_made("llama").to(torch.bfloat16), tmp_path, "safetensors")
    model = load(tmp_path, "tensor_parallel", dtype=dtype)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    same_parameters(model, plain)
    assert {one.dtype for one in model.parameters()} == {one.dtype for one in plain.parameters()}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert model.config.dtype == plain.config.dtype


@ranks(2)
def test_fully_sharded_training_has_a_name(tmp_path: Path) -> None:
    """As `plans.FullyShard()`: the parameters are parts of flat memory, gathered block by block."""
    plain = _made("llama")
    _save(plain, tmp_path, "safetensors")
    model = load(tmp_path, "fully_shard")
    assert len(model.fully_sharded.units) == 3
    same_parameters(model, plain)


@ranks(2)
def test_another_class_or_configuration_may_be_given(tmp_path: Path) -> None:
    """An Auto class chooses by the configuration."""
    plain = _made("llama").model
    _save(plain, tmp_path, "safetensors")
    config = llama_config()
    config.attention_dropout = 0.25
    model = load(tmp_path, "rows", model_class=AutoModel, config=config, dtype="float64")
    same_parameters(model, plain)
    assert model.layers[0].self_attn.attention_dropout == 0.25


@ranks(2)
def test_a_model_without_the_head_of_its_folder(tmp_path: Path) -> None:
    """As `from_pretrained`: names lose the prefix that they have in a model with a head."""
    plain = _made("llama")
    _save(plain, tmp_path, "safetensors")
    same_parameters(load(tmp_path, plans.FullyShard, model_class=AutoModel, dtype="float64"), plain.model)


@ranks(2)
def test_what_cannot_be_loaded_is_said_on_every_rank(tmp_path: Path) -> None:
    """No configuration, no such class, no such plan, a folder without some of the weights, quantised weights."""
    with pytest.raises(CheckpointError, match=r"there is no 'config\.json' in it.*snapshot_download"):
        load(tmp_path / "nothing", "rows")
    _save(_made("llama").model, tmp_path, "safetensors")
    with pytest.raises(PlanKindError, match=r"'tensor_parallel', .*'fully_shard'; found 'tensor parallel'"):
        load(tmp_path, "tensor parallel")
    with pytest.raises(StateMismatchError, match=r"missing in the folder: lm_head\.weight"):
        load(tmp_path, "rows", model_class=AutoModelForCausalLM)
    with pytest.raises(CheckpointError, match=r"one of torch's, its name, or 'auto'; found 'half a float'"):
        load(tmp_path, "rows", dtype="half a float")
    config = llama_config()
    with pytest.raises(CheckpointError, match=r"names no class of transformers \(None\): give model_class"):
        load(tmp_path, "rows", config=config)
    with pytest.raises(CheckpointError, match=r"such as LlamaConfig\(\.\.\.\), found a dict"):
        load(tmp_path, "rows", config={"model_type": "llama"})
    with pytest.raises(CheckpointError, match=r"such as AutoModel; found 'AutoModel'"):
        load(tmp_path, "rows", model_class="AutoModel")
    config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(CheckpointError, match=r"holds quantised weights"):
        load(tmp_path, "rows", config=config)
    dist.barrier()
    if dist.get_rank() == 0:
        (tmp_path / "config.json").write_text('{"model_type": "unheard of"}')
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"of model_type 'unheard of', unknown to transformers"):
        load(tmp_path, "rows")
