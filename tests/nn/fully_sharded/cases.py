"""Small models, their batches, and training them beside a plain twin in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from tests.cases import ROUNDING
from torch import nn
from torch.nn import functional

import shardwise
from shardwise.nn.fully_sharded import FullySharded

WIDTH, WORDS, LENGTH = 6, 11, 5
FEW = 256  # bytes: what ranks tell each other of a loss is less


class Block(nn.Module):
    """A layer that treats samples one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH + 1), nn.Linear(2 * WIDTH + 1, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> Any:
        """With attention of each word to all words of its sample."""
        h = self.norm(x)
        h = functional.scaled_dot_product_attention(h, h, h)
        return x + self.scale * self.down(functional.gelu(self.up(h)))


class Model(nn.Module):
    """Blocks between a table and a layer that share their weight."""

    def __init__(self, block: Callable[[], nn.Module] = Block, layers: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Any, labels: Any = None) -> Any:
        """Scores, or the loss of all words."""
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        scores = self.head(x)
        if labels is None:
            return scores
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def batch_of(step: int, samples: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Words of all ranks' samples, and the words to come, on the default device."""
    made = torch.Generator().manual_seed(step)
    ids, labels = torch.randint(WORDS, (2, sum(samples), LENGTH), generator=made, device="cpu")
    return ids.to(torch.get_default_device()), labels.to(torch.get_default_device())


def mine(batch: torch.Tensor, samples: Sequence[int]) -> shardwise.ShardedTensor:
    """The same as each rank's own samples."""
    return shardwise.from_local(batch.split(list(samples))[dist.get_rank()])


def whole(value: Any) -> torch.Tensor:
    """Of a tensor of any kind."""
    found: torch.Tensor = value.full_tensor() if isinstance(value, shardwise.ShardedTensor) else value
    return found.detach()


def made(model: nn.Module) -> FullySharded:
    """What `fully_shard` has made of a model."""
    found: Any = model.fully_sharded
    assert isinstance(found, FullySharded)
    return found


def twins(make: Callable[[], nn.Module] = Model, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A plain model in float64, and the same one fully sharded."""
    torch.manual_seed(0)
    plain = make().double()
    return plain, shardwise.fully_shard(copy.deepcopy(plain), **options)


def assert_same(plain: nn.Module, model: nn.Module, *, grads: bool = True, tolerance: float = ROUNDING) -> None:
    """The values and the gradients of all parameters."""
    ours = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        value = whole(ours[name]).to(parameter.device)
        torch.testing.assert_close(value, parameter.detach(), rtol=tolerance, atol=tolerance)
        found = ours[name].grad
        assert (found is None) == (parameter.grad is None), name
        if grads and parameter.grad is not None:
            value = whole(found).to(parameter.device)
            torch.testing.assert_close(value, parameter.grad, rtol=tolerance, atol=tolerance)


def train(plain: nn.Module, model: nn.Module, samples: Sequence[int], steps: int = 3) -> None:
    """Some steps of both, compared after each."""
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
    for step in range(steps):
        ids, labels = batch_of(step, samples)
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = plain(ids, labels)
        expected.backward()
        loss = model(mine(ids, samples), mine(labels, samples))
        torch.testing.assert_close(whole(loss), expected.detach(), rtol=ROUNDING, atol=0)
        loss.backward()
        assert_same(plain, model)
        for optimizer in optimizers:
            optimizer.step()
