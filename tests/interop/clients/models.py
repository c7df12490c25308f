"""Small models of transformers with random weights, how they are sharded over two ranks, and how twins are compared."""

from __future__ import annotations

import copy
import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing is looked for elsewhere

import torch
from tests.cases import chunks
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise import ShardedTensor, ShardingPlan, shard_module

ROWS, COLUMNS = chunks(0, 0, 1), chunks(1, 0, 1)
PLAN = {
    "**.embed_tokens.weight": ROWS,
    "**.[qkv]_proj.weight": ROWS,
    "**.o_proj.weight": COLUMNS,
    "**.gate_proj.weight": ROWS,
    "**.up_proj.weight": ROWS,
    "**.down_proj.weight": COLUMNS,
}


def config(tied: bool = False) -> LlamaConfig:
    """Two layers, 32 words."""
    return LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


def llama(tied: bool = False) -> Any:
    """The same on every rank, in float64."""
    torch.manual_seed(0)
    return LlamaForCausalLM(config(tied)).to(torch.float64).eval()


def sharded(model: LlamaForCausalLM) -> Any:
    """The model, with its matrices in pieces."""
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    return shard_module(model, ShardingPlan(PLAN if tied else {**PLAN, "lm_head.weight": ROWS}))


def twins(tied: bool = False) -> tuple[Any, Any]:
    """The same model twice: in pieces, and plain."""
    plain = llama(tied)
    return sharded(copy.deepcopy(plain)), plain


def whole(tensor: Any) -> torch.Tensor:
    """The plain tensor, sharded or not."""
    return tensor.full_tensor().detach() if isinstance(tensor, ShardedTensor) else tensor.detach()


def same_parameters(model: nn.Module, plain: nn.Module) -> None:
    """Assert that both have the same values under the same names."""
    ours, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
    assert list(ours) == list(theirs)
    for name, parameter in ours.items():
        torch.testing.assert_close(whole(parameter), theirs[name].detach(), msg=lambda m, n=name: f"{n}: {m}")


def same_gradients(model: nn.Module, plain: nn.Module) -> None:
    """Assert that both have the same gradients, and the same parameters without one."""
    theirs = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        expected = theirs[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(whole(parameter.grad), expected, msg=lambda m, n=name: f"{n}: {m}")


def token_ids(rows: int = 4, length: int = 6, seed: int = 1) -> torch.Tensor:
    """Words that are the same on every rank; none of them is special."""
    return torch.randint(3, 32, (rows, length), generator=torch.Generator().manual_seed(seed))
