"""Optimizers over shards in CUDA memory: NCCL ranks that share one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cases import assert_close

from shardwise import ChunkShardingSpec, ShardedOptimizer
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD fused": ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "AdamW": ("AdamW", {}),
    "AdamW fused": ("AdamW", {"fused": True}),
    "AdamW capturable": ("AdamW", {"capturable": True}),
    "Adafactor": ("Adafactor", {}),
}
ROWS = ChunkShardingSpec(0, [f"rank:{rank}/cuda:0" for rank in range(2)])
COLUMNS = ChunkShardingSpec(1, [f"rank:{rank}/cuda:0" for rank in (1, 0, 1)])


@pytest.mark.parametrize("kind", OPTIMIZERS)
@ranks(2, backend="nccl")
def test_training_on_a_gpu(kind: str) -> None:
    """With loss scaling, and the state moved to another layout in between: as on the plain twin."""
    name, options = OPTIMIZERS[kind]
    make = getattr(torch.optim, name)
    values = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to("cuda:0")
    plain = values.clone().requires_grad_()
    sharded = shard_tensor(values, ROWS).requires_grad_()
    theirs, ours = make([plain], **options), ShardedOptimizer({"w": sharded}, make, **options)
    scalers = [torch.amp.GradScaler("cuda", init_scale=256.0) for _ in range(2)]
    for turn in range(4):
        if turn == 2:
            state = ours.state_dict()
            sharded = sharded.detach().redistribute(COLUMNS).requires_grad_()
            ours = ShardedOptimizer({"w": sharded}, make, **options)
            ours.load_state_dict(state)
        for one, optimizer, scaler in ((plain, theirs, scalers[0]), (sharded, ours, scalers[1])):
            optimizer.zero_grad()
            loss = (one - 1).pow(2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert_close(sharded.full_tensor().detach(), plain.detach())
