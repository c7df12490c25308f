"""Compiled models in CUDA memory: NCCL ranks that share one GPU."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.llama import Llama, Shape, loss_of

import shardwise
from shardwise.compilation.full_graph.backends import backend_of
from shardwise.testing import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPE = Shape(layers=2, width=64, head=16, words=64, batch=4, sequence=16)
PLAN = {"**.[qkv].weight": 0, "**.o.weight": 1, "**.gate.weight": 0, "**.up.weight": 0, "**.down.weight": 1}


def _assert_trains(model: Any, run: Any, plain: Any, feed: Any) -> None:
    """Gradients of three steps are those of the plain model in float64."""
    torch.manual_seed(1)
    ids, labels = torch.randint(SHAPE.words, (2, SHAPE.batch, SHAPE.sequence), device="cuda")
    for _ in range(3):
        model.zero_grad()
        plain.zero_grad()
        loss_of(run, feed(ids), feed(labels)).backward()
        loss_of(plain, ids, labels).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        grad = one.grad.full_tensor() if isinstance(one, shardwise.ShardedTensor) else one.grad
        torch.testing.assert_close(grad, other.grad, rtol=1e-9, atol=1e-11)


def _rows(batch: torch.Tensor) -> Any:
    return shardwise.from_local(batch.split([3, 1])[dist.get_rank()], sizes=[3, 1])


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("way", ["tensor parallel", "fully sharded"])
@ranks(2, backend="nccl")
def test_gradients(way: str, fullgraph: bool) -> None:
    """By inductor, in one graph and unit by unit."""
    torch.manual_seed(0)
    plain = Llama(SHAPE).double().cuda()
    model: Any = copy.deepcopy(plain)
    if way == "tensor parallel":
        shardwise.shard_module(model, PLAN)
    else:
        shardwise.fully_shard(model, weights=[3, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, as it loads the compiler and compiles
        compiled = shardwise.compile(model, fullgraph=fullgraph)
        _assert_trains(model, compiled, plain, _rows if way == "fully sharded" else lambda batch: batch)


@ranks(2, backend="nccl")
def test_batches_of_many_sizes() -> None:
    """Code that inductor compiled for two of them serves the others."""
    torch.manual_seed(0)
    plain = Llama(SHAPE).double().cuda()
    model: Any = copy.deepcopy(plain)
    shardwise.shard_module(model, PLAN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        backend: Any = backend_of()
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        for batch in (4, 6, 10, 8):
            ids, labels = torch.randint(SHAPE.words, (2, batch, SHAPE.sequence), device="cuda")
            for run, owner in ((compiled, model), (plain, plain)):
                owner.zero_grad()
                loss_of(run, ids, labels).backward()
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                grad = one.grad.full_tensor() if isinstance(one, shardwise.ShardedTensor) else one.grad
                torch.testing.assert_close(grad, other.grad, rtol=1e-9, atol=1e-11)
    assert backend.keywords["inner_compile"].compilations == 4
