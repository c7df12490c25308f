"""Random numbers on a GPU: those of a plain tensor, whatever the layout, on NCCL ranks that share the GPU."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from tests.ops.test_drawing import DRAWS
from tests.tensor.test_random import FILLS
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.tensor.random import Draw, flat
from shardwise.testing import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZE = (7, 6)
LARGE = (2051, 1537)  # several chunks of every GPU, and a part of one
LAST_IS_SHORT = (2051, 1237)  # on an H200, of whose last chunk less than a half is drawn
CHUNKED = {
    "uniform_": lambda x: x.uniform_(-2, 3),
    "normal_": lambda x: x.normal_(1, 2),
    "exponential_": lambda x: x.exponential_(2.0),
    "log_normal_": lambda x: x.log_normal_(),
    "cauchy_": lambda x: x.cauchy_(),
    "geometric_": lambda x: x.geometric_(0.3),
    "random_": lambda x: x.random_(50),
    "bernoulli_": lambda x: x.bernoulli_(0.4),
}


@pytest.mark.parametrize("name", FILLS)
@ranks(4, backend="nccl")
def test_small_tensors_are_filled_as_plain_ones(name: str) -> None:
    """The same bits for every layout, and the generator goes on as after the plain draw."""
    torch.manual_seed(5)
    expected, after = FILLS[name](torch.ones(SIZE, device="cuda")), torch.rand(3, device="cuda")
    for sharding in (0, 1, None):
        torch.manual_seed(5)
        found = FILLS[name](shardwise.ones(sharding, *SIZE))
        assert torch.equal(found.full_tensor(), expected) or name == "orthogonal", sharding
        torch.testing.assert_close(found.full_tensor(), expected)
        assert torch.equal(torch.rand(3, device="cuda"), after), sharding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@ranks(4, backend="nccl")
def test_large_tensors_have_the_numbers_of_plain_ones(dtype: torch.dtype) -> None:
    """Read from the middle of the plain draw, for rows and columns."""
    fills = CHUNKED if dtype.is_floating_point else {"random_ of a wide range": lambda x: x.random_(2**40)}
    for (name, fill), size in itertools.product(fills.items(), (LARGE, LAST_IS_SHORT)):
        torch.manual_seed(5)
        expected, after = fill(torch.zeros(size, device="cuda", dtype=dtype)), torch.rand(3, device="cuda")
        for sharding in (0, 1, None):
            torch.manual_seed(5)
            assert torch.equal(fill(shardwise.zeros(sharding, *size, dtype=dtype)).full_tensor(), expected), name
            assert torch.equal(torch.rand(3, device="cuda"), after), (name, sharding, size)


@pytest.mark.parametrize("name", [*DRAWS, "rrelu"])
@ranks(4, backend="nccl")
def test_draws_do_not_depend_on_the_layout(name: str) -> None:
    """And leave the generator alike."""
    function = {**DRAWS, "rrelu": lambda x: functional.rrelu(x, training=True)}[name]
    values = torch.linspace(-1, 1, 42, dtype=torch.float64, device="cuda").reshape(SIZE)
    first: Any = None
    for sharding in (0, 1, None):
        for _ in range(2):
            torch.manual_seed(3)
            found = function(shardwise.shard(values, sharding)).full_tensor(), torch.rand(2, device="cuda")
            first = found if first is None else first
            torch.testing.assert_close(found[0], first[0], rtol=1e-10, atol=1e-10)
            assert torch.equal(found[1], first[1]), sharding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(64, 24), (3, 4), (2048, 1536), (1500, 1537)])
@ranks(4, backend="nccl")
def test_dropout_is_that_of_a_plain_tensor(size: tuple[int, int], dtype: torch.dtype) -> None:
    """Forward and gradient, where the number of elements is a multiple of four."""
    values = torch.randn(size, device="cuda", dtype=dtype, generator=torch.Generator("cuda").manual_seed(0))
    plain = values.clone().requires_grad_()
    torch.manual_seed(3)
    expected, after = functional.dropout(plain, 0.3), torch.rand(2, device="cuda")
    expected.sum().backward()
    for sharding in (0, 1, None):
        x = shardwise.shard(values, sharding).requires_grad_()
        torch.manual_seed(3)
        found = functional.dropout(x, 0.3)
        assert torch.equal(torch.rand(2, device="cuda"), after), sharding
        assert torch.equal(found.full_tensor(), expected), sharding
        found.sum().backward()
        assert torch.equal(x.grad.full_tensor(), plain.grad), sharding


@ranks(4, backend="nccl")
def test_masks_of_large_tensors_keep_as_many_as_they_should() -> None:
    """Within five standard errors, in every shard, and no shard repeats another."""
    torch.manual_seed(0)
    kept = functional.dropout(shardwise.ones(0, *LARGE), 0.25).full_tensor() != 0
    error = math.sqrt(0.25 * 0.75 / kept.numel())
    assert abs(kept.double().mean().item() - 0.75) < 5 * error
    rows = kept[: LARGE[0] // 4 * 4].view(4, -1)
    for k in range(1, 4):
        assert not torch.equal(rows[0], rows[k])


@ranks(2, backend="nccl")
def test_a_checkpoint_draws_the_same_again() -> None:
    """torch gives back the state of the GPU's generator."""
    x = shardwise.ones(0, 64, 64).requires_grad_()
    torch.manual_seed(1)
    functional.dropout(x * 2, 0.5).sum().backward()
    expected = x.grad.full_tensor()
    x.grad = None
    torch.manual_seed(1)
    checkpoint(lambda y: functional.dropout(y * 2, 0.5), x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad.full_tensor(), expected)


@ranks(4, backend="nccl")
def test_a_model_that_is_initialised_after_it_is_sharded_is_the_plain_one() -> None:
    """On the meta device, sharded, given memory, then initialised."""
    torch.manual_seed(7)
    with torch.device("cuda"):
        plain = nn.Sequential(nn.Linear(48, 96), nn.Linear(96, 4))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(48, 96), nn.Linear(96, 4))
    shardwise.shard_module(model, {"0.weight": 0, "0.bias": 0, "1.weight": 1})
    model.to_empty(device="cuda")
    torch.manual_seed(7)
    for layer in model:
        layer.reset_parameters()
    assert torch.equal(model[0].weight.full_tensor(), plain[0].weight)
    assert torch.equal(model[1].weight.full_tensor(), plain[1].weight)


def test_every_fill_is_drawn_in_chunks_here() -> None:
    """What is documented of CUDA holds for this GPU and this version of torch."""
    for function in (torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.bernoulli_, torch.Tensor.exponential_):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            assert flat._step_on_cuda(Draw(function), dtype, torch.device("cuda", 0)) is not None, (function, dtype)
