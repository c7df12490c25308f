"""How many calls of torch a layer of experts makes beside its own forward: on an accelerator they are its host time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import from_local, plans
from shardwise.testing import ranks

EXPERTS, WIDTH, TOKENS, CHOICES = 8, 16, 64, 2


class Scales(nn.Module):
    """Experts that cost next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, tokens: Any, chosen: Any, weights: Any) -> Any:
        """Each token times the scale of its one expert."""
        return tokens * self.scale[chosen[:, 0]] * weights


class Layer(nn.Module):
    """With the experts under a name."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Scales()


def calls(*, weights_want: bool) -> Counter[str]:
    """What is called in a forward and backward, once everything that is worked out once is."""
    torch.manual_seed(0)
    model = Layer()
    layer = shardwise.shard_module(model, plans.expert_parallel(model, experts="experts")).experts
    tokens = from_local(torch.randn(TOKENS, WIDTH))
    weights = from_local(torch.rand(TOKENS, CHOICES)).requires_grad_(weights_want)
    chosen = from_local((torch.arange(TOKENS)[:, None] * torch.tensor([1, 4]) + dist.get_rank()) % EXPERTS)

    def step() -> None:
        layer(tokens.detach().requires_grad_(), chosen, weights).backward(tokens)
        layer.scale.grad = weights.grad = None

    for _ in range(3):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return Counter(event.name for event in profile.events() if event.name.startswith("aten::"))


@ranks(4)
def test_a_layer_makes_few_calls() -> None:
    """One sort, no zeros for what is overwritten whole, nothing packed twice."""
    for weights_want, most in ((False, 330), (True, 345)):
        found = calls(weights_want=weights_want)
        assert sum(found.values()) <= most, found.most_common()
        assert found["aten::sort"] <= 1
        assert found["aten::copy_"] <= 20, found.most_common()
        assert found["aten::zero_"] <= 10, found.most_common()
