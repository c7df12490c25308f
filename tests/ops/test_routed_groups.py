"""What values send to other ranks, among some ranks of the world only; and its second derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import assert_close, chunks
from tests.ops.twin import normal

import shardwise
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

ROW, AT, SOURCE = normal(13), torch.tensor([3, 12, 0, 7, 7]), normal(5, seed=1)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sort": lambda x, i, s: x.sort(stable=True).values,
    "topk": lambda x, i, s: x.topk(4).values,
    "read": lambda x, i, s: x[i] * s,
    "added": lambda x, i, s: x.index_add(0, i, s * s),
    "largest of each": lambda x, i, s: x.scatter_reduce(0, i, s, "amax"),
    "running product": lambda x, i, s: x.cumprod(0),
    "median": lambda x, i, s: x.median(),
}


@ranks(4)
def test_in_a_group_of_some_ranks() -> None:
    """Ranks that are not in the group take no part."""
    group = dist.new_group([3, 1])
    if dist.get_rank() in (1, 3):
        spec = chunks(0, 3, 1)
        for name, function in FUNCTIONS.items():
            plain = [ROW.clone().requires_grad_(), AT, SOURCE.clone().requires_grad_()]
            leaves: list[Any] = [shard_tensor(one.detach(), spec, process_group=group) for one in plain]
            leaves[0].requires_grad_()
            leaves[2].requires_grad_()
            with shardwise.gather_budget(0):
                found = function(*leaves)
                assert_close(found.detach().full_tensor(), function(*plain).detach(), name)
                (found * found).sum().backward()
            (function(*plain) ** 2).sum().backward()
            for one, other in ((leaves[0], plain[0]), (leaves[2], plain[2])):
                assert (one.grad is None) == (other.grad is None), name
                if other.grad is not None:
                    assert_close(one.grad.full_tensor(), other.grad, name)
    dist.barrier()
    if dist.get_rank() in (1, 3):
        dist.destroy_process_group(group)


@pytest.mark.parametrize("name", ["sort", "read", "added", "running product"])
@ranks(3)
def test_second_derivatives(name: str) -> None:
    """The gradient of a gradient goes through the same exchanges again."""
    function, results = FUNCTIONS[name], []
    for spec in (None, chunks(0, 2, 0, 1)):
        x, at, source = (one.clone() if spec is None else shard_tensor(one, spec) for one in (ROW, AT, SOURCE))
        x, source = x.requires_grad_(), source.requires_grad_()
        with shardwise.gather_budget(0):
            loss = (function(x, at, source) ** 3).sum()
            used = [x] if name in ("sort", "running product") else [x, source]
            grads = torch.autograd.grad(loss, used, create_graph=True)
            sum((grad * grad).sum() for grad in grads).backward()
        results.append([one.grad if spec is None else one.grad.full_tensor() for one in used])
    for one, other in zip(*results, strict=True):
        assert_close(other, one, name)
