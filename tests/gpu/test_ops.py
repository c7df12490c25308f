"""Ops on shards in CUDA memory: NCCL ranks that share one GPU."""

from __future__ import annotations

import pytest
import torch
from tests.cases import SIZE, assert_close
from tests.ops.matrix import FAMILIES

import shardwise
from shardwise import ChunkShardingSpec, GridShardingSpec
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SPECS = {
    "rows": ChunkShardingSpec(0, [f"rank:{rank}/cuda:0" for rank in range(4)]),
    "grid": GridShardingSpec(
        (0, 1), [[f"rank:{rank}/cuda:0" for rank in pair] for pair in ((0, 1), (2, 3))], [(1, 6), None]
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", SPECS)
@ranks(4, backend="nccl")
def test_the_matrix_on_a_gpu(layout: str, family: str) -> None:
    """Forward and backward, compared with the plain tensor on the same GPU."""
    with torch.device("cuda:0"):
        for name, function in FAMILIES[family].items():
            generator = torch.Generator("cuda:0").manual_seed(0)
            values = [torch.randn(SIZE, dtype=torch.float64, generator=generator) for _ in range(2)]
            tensors = [shard_tensor(value, SPECS[layout]).requires_grad_() for value in values]
            plains = [value.requires_grad_() for value in values]
            expected, found = function(*plains), function(*tensors)
            assert_close(found.full_tensor(), expected, name)
            if expected.requires_grad:
                expected.sum().backward()
                found.sum().backward()
                for plain, tensor in zip(plains, tensors, strict=True):
                    if plain.grad is not None:
                        assert_close(tensor.grad.full_tensor(), plain.grad, f"gradient of {name}")
    assert shardwise.zeros(SPECS[layout], *SIZE).is_cuda
