"""Tensor parallel plans: what is cut how and why, which are refused, and that models trained by them are right."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from tests.models.twins import assert_trains_alike, joined
from tests.models.zoo import SINGLE, SIZES, WORDS, loss_of, made, words
from tests.nn.plans.worlds import world_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed import expert_parallel  # noqa: F401 - which registers its words
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from shardwise import ChunkShardingSpec, ShardedTensor, gather_budget, shard_module
from shardwise.errors import PlanError
from shardwise.nn.plans.transformers_plan import WORDS as KNOWN_WORDS
from shardwise.plans import tensor_parallel
from shardwise.testing import ranks


class Torchs(nn.Module):
    """Layers of torch itself, with words around them."""

    def __init__(self, heads: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.layer = nn.TransformerDecoderLayer(16, heads, 24, dropout=0, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, x: Any, y: Any) -> Any:
        """A loss of next words."""
        hidden = self.words(x)
        scores = self.head(self.layer(hidden, hidden.flip(1)))
        return nn.functional.cross_entropy(scores.flatten(0, 1), y.flatten())


def llama(heads: int = 4, keys: int = 2, **options: Any) -> Any:
    """A tiny one."""
    sizes = {**SIZES, "num_attention_heads": heads, "hidden_size": 4 * heads}
    config = transformers.LlamaConfig(vocab_size=WORDS, num_key_value_heads=keys, **{**sizes, **options})
    return transformers.LlamaForCausalLM(config)


def qwen2() -> nn.Module:
    """With biases, and one table for words and scores."""
    config = transformers.Qwen2Config(vocab_size=WORDS, num_key_value_heads=2, tie_word_embeddings=True, **SIZES)
    return transformers.Qwen2ForCausalLM(config)


def phi3() -> nn.Module:
    """Queries, keys and values in one layer, fewer keys than queries; gate and first layer in one."""
    return transformers.Phi3ForCausalLM(
        transformers.Phi3Config(vocab_size=WORDS, num_key_value_heads=2, pad_token_id=0, **SIZES)
    )


def cut_of(model: nn.Module, ending: str, **options: Any) -> tuple[str, str]:
    """What becomes of the first parameter whose name ends so, and why."""
    return next((one.cut, one.why) for one in tensor_parallel(model, **options).reasons if one.name.endswith(ending))


@ranks(2)
def test_models_train_as_their_twins() -> None:
    """Loss and every gradient; the models of the zoo are tried among its own tests."""
    torch.manual_seed(0)
    for make in (qwen2, phi3):
        plain = make().double()
        twin = shard_module(copy.deepcopy(plain), tensor_parallel(plain))
        assert_trains_alike(twin, plain, joined(words()), words(), loss_of, SINGLE)
    plain, inputs = Torchs().double(), {"x": words()["input_ids"], "y": words()["targets"]}
    for weights in (None, [3, 1]):
        twin = shard_module(copy.deepcopy(plain), tensor_parallel(plain, weights=weights))
        with gather_budget(0):
            assert_trains_alike(twin, plain, inputs, inputs, lambda model, **given: model(**given))


@ranks(4)
def test_replicas_along_the_other_axis_of_a_mesh() -> None:
    """Data parallel by tensor parallel is one plan: each line of the mesh holds the whole model, and logits and
    gradients are the plain model's; in the group of one line, it holds that line alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name in ("Llama", "GPT-2"):  # the other has three layers packed in one
        plain = made(name)
        plan = tensor_parallel(plain, mesh["tp"])
        twin = shard_module(copy.deepcopy(plain), plan)
        sharded = [one for one in twin.parameters() if isinstance(one, ShardedTensor)]
        assert sharded
        for parameter in sharded:
            held = sum(shard.tensor.numel() for shard in parameter.local_shards())
            assert held * 2 == parameter.numel()
        assert_trains_alike(twin, plain, joined(words()), words(), loss_of, SINGLE)
        with torch.no_grad():
            expected, found = (model(words()["input_ids"]).logits for model in (plain, twin))
            torch.testing.assert_close(found.full_tensor(), expected, rtol=SINGLE, atol=SINGLE)
    own = tensor_parallel(plain, mesh["tp"], process_group=mesh["tp"].get_group())
    assert {type(spec) for spec in own.plan.values()} == {ChunkShardingSpec}
    shard_module(copy.deepcopy(plain), own, process_group=mesh["tp"].get_group())
    with pytest.raises(PlanError, match=r"give one of them, as in mesh\['tp'\]"):
        tensor_parallel(plain, mesh)


def test_each_parameter_has_a_reason() -> None:
    """By the words of the model's plan, and by names where it has none; the table says what `reasons` has."""
    with world_of(2):
        plan = tensor_parallel(llama())
        lines = str(plan).splitlines()
        assert lines[0].split() == ["parameter", "size", "cut", "why"]
        assert re.fullmatch(
            r"model\.layers\.\*\.self_attn\.o_proj\.weight  \(2×\) +16×16  dim 1 over 2 ranks  "
            "the model's plan: rowwise, 4 heads of queries and 2 of keys and values",
            next(line for line in lines if "o_proj" in line),
        )
        assert lines[-1] == "16 of 21 parameters are cut"
        assert {one.name for one in plan.reasons if one.cut != "plain"} == set(plan.plan)
        assert cut_of(llama(), "norm.weight") == ("plain", "a norm")
        gpt2 = made("GPT-2")  # whose weights are turned
        assert cut_of(gpt2, "c_attn.weight") == (
            "3 parts of dim 1 over 2 ranks",
            "queries, keys and values in one, 4 heads",
        )
        assert cut_of(gpt2, "attn.c_proj.weight") == ("dim 0 over 2 ranks", "output of attention, 4 heads")
        assert cut_of(gpt2, "attn.c_proj.bias") == ("plain", "output of attention, added to the sum")
        assert cut_of(gpt2, "wpe.weight") == ("plain", "a small table")
        assert cut_of(made("BERT"), "layer.0.output.dense.weight")[0] == "dim 1 over 2 ranks"
        assert cut_of(made("BERT"), "predictions.bias")[1].endswith("tied to cls.predictions.decoder.bias")
        assert cut_of(made("T5"), "SelfAttention.o.weight") == ("dim 1 over 2 ranks", "output of attention, 4 heads")
        assert cut_of(made("Mixtral"), "experts.gate_up_proj")[0] == "2 parts of dim 1 over 2 ranks"
        adapted = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        assert cut_of(adapted, "q_proj.base_layer.weight")[1].startswith("the model's plan: colwise, 4 heads")
        for adapter, cut in {"q_proj.lora_A": "plain", "q_proj.lora_B": "dim 0 over 2 ranks"}.items():
            assert cut_of(adapted, f"{adapter}.default.weight")[0] == cut
        for adapter, cut in {"down_proj.lora_A": "dim 1 over 2 ranks", "down_proj.lora_B": "plain"}.items():
            assert cut_of(adapted, f"{adapter}.default.weight")[0] == cut


def test_every_word_of_transformers_is_known_or_refused() -> None:
    """Of the release that is installed; a word that nobody knows is named in the error."""
    kernels = {"megamoe_router", "megamoe_experts"}  # which lay weights out for kernels of their own
    assert set(ALL_PARALLEL_STYLES.keys()) - set(KNOWN_WORDS) == kernels
    model = llama()
    model._tp_plan["model.layers.*.mlp.up_proj"] = "diagonal"
    with world_of(2), pytest.raises(PlanError, match=r"says 'diagonal' of 'model\.layers\.0\.mlp\.up_proj\.weight'"):
        tensor_parallel(model)


def test_a_plan_that_would_cut_through_a_head_is_refused() -> None:
    """With the numbers, and calls that mend it, which do."""
    with world_of(4):
        with pytest.raises(
            PlanError, match="4 ranks cannot share 4 heads of queries and 2 of keys and values"
        ) as error:
            tensor_parallel(llama())
        assert "'model.layers.0.self_attn.q_proj.weight' and 7 other parameters" in str(error.value)
        assert "plans.fully_sharded(model)" in str(error.value)
        call = re.search(r"2 ranks can: mesh = (.*), and (tensor_parallel\(.*?'\]\))", str(error.value))
        assert call is not None
        mesh = eval(call[1], {"init_device_mesh": init_device_mesh})
        names = {"tensor_parallel": tensor_parallel, "model": llama(), "mesh": mesh}
        assert cut_of(llama(), "k_proj.weight", mesh=mesh["tp"])[0] == "dim 0 over 2 ranks, 2 replicas"
        assert eval(call[2], names).plan
    with world_of(2):
        for model, ending in ((llama(6, 3), "q_proj.weight"), (nn.MultiheadAttention(12, 3), "out_proj.weight")):
            with pytest.raises(PlanError, match=r"3 .*would be cut through a head.*weights=\[2, 1\]"):
                tensor_parallel(model)
            assert cut_of(model, ending, weights=[2, 1])[0].endswith("as 16 | 8" if ending[0] == "q" else "as 8 | 4")
        # One head of keys for all queries stays whole, and so does attention with one head.
        assert cut_of(llama(4, 1), "k_proj.weight")[0] == "plain"
        assert cut_of(llama(4, 1), "q_proj.weight")[0] == "dim 0 over 2 ranks"
        with pytest.raises(PlanError, match=r"would cut nothing(.|\n)*in_proj_weight +36×12 +plain"):
            tensor_parallel(nn.MultiheadAttention(12, 1))
        with pytest.raises(PlanError, match=r"nothing of Sequential(.|\n)*plain +none of the names that are known"):
            tensor_parallel(nn.Sequential(nn.Linear(2, 2)))


@ranks(2)
def test_making_a_plan_changes_no_buffer() -> None:
    """A parametrization in training takes a step of its own each time that its weight is read."""
    torch.manual_seed(0)
    model = nn.ModuleList(nn.ModuleDict({"fc1": nn.Linear(4, 8), "fc2": nn.Linear(8, 4)}) for _ in range(2))
    nn.utils.parametrizations.spectral_norm(model.get_submodule("1.fc2"))
    before = [one.clone() for one in model.buffers()]
    tensor_parallel(model)
    assert before
    for one, other in zip(model.buffers(), before, strict=True):
        assert torch.equal(one, other)
