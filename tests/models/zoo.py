"""Tiny models of transformers, randomly initialised, each with inputs that give a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from tests.cases import ROUNDING
from torch import nn
from torch.nn import functional

BATCH, LENGTH, WORDS = 4, 6, 48
SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 24}


def ids(seed: int = 1, length: int = LENGTH) -> torch.Tensor:
    """Words of a batch, the same on every rank; none is a special one."""
    return torch.randint(3, WORDS, (BATCH, length), generator=torch.Generator().manual_seed(seed))


def numbers(*size: int, seed: int = 2) -> torch.Tensor:
    """Pictures and sounds."""
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


SINGLE = 1e-5  # where a model rounds to float32 within: 1.2e-7, some hundred operations deep


@dataclass(frozen=True)
class Example:
    """How a model is made, what it is given, and what of it is cut how under tensor parallelism."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]  # the model's, and the targets of its scores
    rows: tuple[str, ...]  # last parts of modules' names whose weights are cut along their rows, with their biases
    columns: tuple[str, ...]  # and along their columns
    tolerance: float = ROUNDING


def loss_of(model: nn.Module, targets: Any = None, **inputs: Any) -> Any:
    """The loss of a model's scores in float64: given labels, transformers would round the scores to float32."""
    made = model(**inputs)
    if targets is None:
        return made.loss
    loss = functional.cross_entropy(made.logits.double().flatten(0, -2), targets.flatten())
    return loss + 0.1 * made.aux_loss if "aux_loss" in made else loss


def words() -> dict[str, Any]:
    """A batch of a language model, of which the last words of one sample are padding."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[1, -2:] = 0
    return {"input_ids": ids(), "attention_mask": mask, "targets": ids(seed=2)}


def plain_words() -> dict[str, Any]:
    """The same without padding."""
    return {"input_ids": ids(), "targets": ids(seed=2)}


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=12, n_embd=16, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=WORDS, max_position_embeddings=12, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **SIZES
    )
    return transformers.BertForMaskedLM(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, dropout_rate=0,
        relative_attention_num_buckets=8, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _clip() -> nn.Module:
    text = {"vocab_size": WORDS, "max_position_embeddings": 12, "eos_token_id": 2, **SIZES}
    vision = {"image_size": 8, "patch_size": 4, **SIZES}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, max_position_embeddings=12, **SIZES)
    )


def _mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=WORDS, num_key_value_heads=2, num_local_experts=4, max_position_embeddings=12,
        output_router_logits=True, experts_implementation="eager", **SIZES,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def _deepseek() -> nn.Module:
    config = transformers.DeepseekV3Config(
        vocab_size=WORDS, moe_intermediate_size=8, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
        max_position_embeddings=12, num_key_value_heads=4, experts_implementation="eager", **SIZES,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


def _mamba() -> nn.Module:
    return transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=WORDS, hidden_size=16, state_size=4, num_hidden_layers=2, time_step_rank=4)
    )


def _whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=WORDS, num_mel_bins=8, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24, max_source_positions=5, dropout=0,
        max_target_positions=12, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def _vit() -> nn.Module:
    config = transformers.ViTConfig(
        image_size=8, patch_size=4, num_labels=5, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **SIZES
    )
    return transformers.ViTForImageClassification(config)


ATTENTION = ("q_proj", "k_proj", "v_proj")

ZOO: dict[str, Example] = {
    "GPT-2": Example(_gpt2, words, (), ("c_proj",)),
    "BERT": Example(_bert, words, ("query", "key", "value", "intermediate.dense"), ("output.dense",)),
    "T5": Example(
        _t5, lambda: {**words(), "decoder_input_ids": ids(seed=3)}, ("q", "k", "v", "wi"), ("o", "wo"), SINGLE
    ),
    "CLIP": Example(
        _clip,
        lambda: {"input_ids": ids(), "pixel_values": numbers(BATCH, 3, 8, 8), "return_loss": True},
        (*ATTENTION, "fc1"),
        ("out_proj", "fc2"),
    ),
    "Llama": Example(_llama, words, (*ATTENTION, "gate_proj", "up_proj"), ("o_proj", "down_proj"), SINGLE),
    "Mixtral": Example(_mixtral, words, ATTENTION, ("o_proj",), SINGLE),
    "DeepSeek-V3": Example(
        _deepseek, words, ("q_b_proj", "kv_b_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj"), SINGLE
    ),
    "Mamba": Example(_mamba, plain_words, ("dt_proj",), ("out_proj", "x_proj"), SINGLE),
    "Whisper": Example(
        _whisper,
        lambda: {"input_features": numbers(BATCH, 8, 10), "decoder_input_ids": ids(), "targets": ids(seed=2)},
        (*ATTENTION, "fc1"),
        ("out_proj", "fc2"),
    ),
    "ViT": Example(
        _vit,
        lambda: {"pixel_values": numbers(BATCH, 3, 8, 8), "targets": torch.arange(BATCH)},
        ("query", "key", "value", "intermediate.dense", "q_proj", "k_proj", "v_proj", "fc1"),
        ("output.dense", "o_proj", "out_proj", "fc2"),
    ),
}


def made(name: str) -> nn.Module:
    """The model in float64, the same on every rank; no value of it is zero or one, as fresh norms and biases are."""
    torch.manual_seed(0)
    model = ZOO[name].make().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model
