"""Models that the tests of modules share, and how a plain twin is compared."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ROUNDING, assert_holds, chunks
from torch import nn

from shardwise import ShardedTensor, from_local

ROWS, COLUMNS = chunks(0, 0, 1, 2, 3), chunks(1, 0, 1, 2, 3)
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


class Net(nn.Module):
    """An embedding, two layers and a norm; the head is tied to the embedding if wanted."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.fc1 = nn.Linear(6, 7)
        self.fc10 = nn.Linear(7, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.register_buffer("scale", torch.ones(6))
        if tied:
            self.head.weight = self.embed.weight
        self.double()

    def forward(self, ids: torch.Tensor) -> Any:
        """From ids to scores of the next ids. Sharded, it takes each rank's own ids and gives the scores of all."""
        return self.head(self.norm(self.fc10(self.fc1(self.embed(ids)).relu())) * self.scale)


def net(seed: int = 0, tied: bool = False) -> Net:
    """The same on every rank."""
    torch.manual_seed(seed)
    return Net(tied)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor, sharded or not."""
    return tensor.full_tensor().detach() if isinstance(tensor, ShardedTensor) else tensor.detach()


def same(module: nn.Module, plain: nn.Module) -> None:
    """Assert that what is here of every parameter is that of the plain twin, with its gradient if it has one."""
    ours, theirs = dict(module.named_parameters()), dict(plain.named_parameters())
    assert list(ours) == list(theirs)
    for name, parameter in ours.items():
        assert_holds(parameter, theirs[name], name)
        if theirs[name].grad is not None:
            assert_holds(parameter.grad, theirs[name].grad, f"gradient of {name}")
        assert parameter.requires_grad == theirs[name].requires_grad


def batches(seed: int = 0, group: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Each rank's own ids, joined, and the same ids in a plain tensor; the ranks have different numbers of them."""
    sizes = [3 + rank % 2 for rank in range(dist.get_world_size(group))]
    everyone = torch.randint(7, (sum(sizes),), generator=torch.Generator().manual_seed(seed))
    return from_local(everyone.split(sizes)[dist.get_rank(group)], process_group=group), everyone


def train_alike(module: nn.Module, plain: nn.Module, optimizer: Any, group: Any = None) -> None:
    """Assert that both give the same losses, gradients and parameters, step by step."""
    optimizers = [optimizer(one.parameters()) for one in (module, plain)]
    for step in range(3):
        losses = []
        for one, by, ids in zip((module, plain), optimizers, batches(step, group), strict=True):
            by.zero_grad()
            loss = one(ids).pow(2).mean()
            loss.backward()
            by.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=ROUNDING), f"step {step}"
        same(module, plain)


def twins(tied: bool = False) -> tuple[Net, Net]:
    """The same model twice."""
    model = net(tied=tied)
    return model, copy.deepcopy(model)
