"""Set-ups whose peak memory is predicted and measured: three models, each sharded in four ways."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from benchmarks.llama import Llama, Shape
from shardwise.estimation.planning import Candidate
from shardwise.estimation.planning.candidate import recompute_blocks
from shardwise.nn.fully_sharded import Precision

LLAMA = Shape(layers=8, width=1024, head=64, words=8192, batch=8, sequence=512)
WIDTH = 1024


class Block(nn.Module):
    """Two layers behind a norm, added to what they are given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the layers make of it."""
        found: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return found


def _mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*[Block(WIDTH) for _ in range(8)]), torch.ones(4096, WIDTH)


def _llama() -> tuple[nn.Module, Tensor]:
    return Llama(LLAMA), torch.zeros(LLAMA.batch, LLAMA.sequence, dtype=torch.int64)


def _encoder() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.ones(8, 512, WIDTH)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"MLP": _mlp, "Llama": _llama, "encoder": _encoder}
TENSOR_PARALLEL = {
    "MLP": {"**.up.*": 0, "**.down.weight": 1},
    "Llama": {"**.[qkv].weight": 0, "**.o.weight": 1, "**.gate.weight": 0, "**.up.weight": 0, "**.down.weight": 1},
    "encoder": {"**.linear1.*": 0, "**.linear2.weight": 1},
}
WAYS = ("tensor parallel", "replicated, autocast", "fully sharded, bf16", "fully sharded, recomputed")


def set_up_model(name: str, way: str, device: str) -> Callable[[], None]:
    """A model that is sharded in some way, and a function that takes a step; called on every rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ranks = dist.get_world_size()
    with torch.device(device):
        model, batch = MODELS[name]()
    given: Any = batch
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    if way == "tensor parallel":
        shardwise.shard_module(model, TENSOR_PARALLEL[name])
    else:
        candidate = Candidate("replicated", 1, (len(batch) // ranks,) * ranks, None)
        given = candidate.cut(batch)
        if way == "fully sharded, recomputed":
            recompute_blocks(model)
        if way.startswith("replicated"):
            candidate.apply(model)
            around = partial(torch.autocast, "cuda", torch.bfloat16)
        else:
            shardwise.fully_shard(model, precision=Precision(torch.bfloat16) if way.endswith("bf16") else None)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        with around():
            loss = model(given).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
