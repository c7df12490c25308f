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


@ranks(4, backend="nccl")
def test_rows_that_go_where_values_say() -> None:
    """Sorted, chosen, read and written along a dim that is cut, with nothing gathered."""
    device, generator = torch.device("cuda:0"), torch.Generator().manual_seed(0)
    values = torch.randn(41, dtype=torch.float64, generator=generator).to(device)
    at, source = torch.tensor([3, 40, 0, 3], device=device), torch.ones(4, dtype=torch.float64, device=device)
    functions = (
        lambda x, i, s: x.sort(stable=True).values,
        lambda x, i, s: x.topk(3).values,
        lambda x, i, s: x[i],
        lambda x, i, s: x.index_add(0, i, s),
        lambda x, i, s: x.cumprod(0),
    )
    for function in functions:
        plain, tensor = values.clone().requires_grad_(), shard_tensor(values, SPECS["rows"]).requires_grad_()
        expected = function(plain, at, source)
        with shardwise.gather_budget(0):
            found = function(tensor, *(shard_tensor(one, SPECS["rows"]) for one in (at, source)))
            (found * found).sum().backward()
        (expected * expected).sum().backward()
        assert_close(found.detach().full_tensor(), expected.detach())
        assert_close(tensor.grad.full_tensor(), plain.grad)
