"""Mixtures of experts of transformers and by hand, and their plain twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from tests.models.zoo import SIZES, WORDS, loss_of
from torch import nn
from torch.nn import functional

LEFT_OUT = {"intermediate_size"}


def mixtral(experts: int, way: str) -> nn.Module:
    """With a loss that balances the router."""
    config = transformers.MixtralConfig(
        vocab_size=WORDS, num_key_value_heads=4, num_local_experts=experts, max_position_embeddings=12,
        output_router_logits=True, experts_implementation=way, **SIZES,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def qwen3(experts: int, way: str) -> nn.Module:
    """Three experts a token."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=WORDS, num_key_value_heads=4, num_experts=experts, num_experts_per_tok=3, moe_intermediate_size=8,
        head_dim=4, max_position_embeddings=12, experts_implementation=way, output_router_logits=True, **SIZES,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


def deepseek(experts: int, way: str) -> nn.Module:
    """With shared experts, and one dense block."""
    config = transformers.DeepseekV3Config(
        vocab_size=WORDS, moe_intermediate_size=8, n_routed_experts=experts, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4,
        v_head_dim=4, max_position_embeddings=12, num_key_value_heads=4, experts_implementation=way, **SIZES,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


def gpt_oss(experts: int, way: str) -> nn.Module:
    """With biases and clamps."""
    config = transformers.GptOssConfig(
        vocab_size=WORDS, num_key_value_heads=4, num_local_experts=experts, num_experts_per_tok=2, head_dim=4,
        max_position_embeddings=12, sliding_window=4, experts_implementation=way, attn_implementation="eager",
        output_router_logits=True, **SIZES,
    )  # fmt: skip
    return transformers.GptOssForCausalLM(config)


MODELS: dict[str, Callable[[int, str], nn.Module]] = {
    "Mixtral": mixtral,
    "Qwen3-MoE": qwen3,
    "DeepSeek-V3": deepseek,
    "gpt-oss": gpt_oss,
}


def made(name: str, experts: int = 8, way: str = "eager") -> nn.Module:
    """A model in float64, with values that are not zero anywhere."""
    torch.manual_seed(5)
    model = MODELS[name](experts, way).double().train()
    model.config.use_cache = False
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


class Experts(nn.Module):
    """Experts by hand: two layers with biases."""

    def __init__(self, experts: int, width: int = 6) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, 5))
        self.down = nn.Parameter(torch.randn(experts, 5, width))
        self.bias = nn.Parameter(torch.randn(experts, width))

    def forward(self, tokens: Any, chosen: Any, weights: Any) -> Any:
        """Each token by its experts."""
        total = torch.zeros_like(tokens)
        for k in range(chosen.shape[1]):
            each = chosen[:, k]
            hidden = functional.gelu(torch.bmm(tokens[:, None], self.up[each]))
            total = total + weights[:, k, None] * (torch.bmm(hidden, self.down[each])[:, 0] + self.bias[each])
        return total


class Mixture(nn.Module):
    """A router and experts, with a layer before and one behind."""

    def __init__(self, experts: int = 7, choices: int = 2, width: int = 6) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(width, width), nn.Linear(width, 2)
        self.router, self.experts = nn.Linear(width, experts), Experts(experts, width)
        self.choices = choices

    def forward(self, x: Any) -> Any:
        """Scores for each token."""
        x = torch.tanh(self.before(x))
        weights, chosen = torch.topk(torch.softmax(self.router(x), -1), self.choices, -1)
        return self.behind(x + self.experts(x, chosen, weights))


def mixture(**options: Any) -> Mixture:
    """The same on every rank, in float64."""
    torch.manual_seed(3)
    return Mixture(**options).double()


__all__ = ["MODELS", "Experts", "Mixture", "loss_of", "made", "mixture"]
