"""A sharded tensor and a DTensor in one op: every rank raises an error that says how to convert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cases import PLAIN, chunks
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import linear

from shardwise import PartialTensor, ReplicatedTensor, from_dtensor, shard_tensor
from shardwise.errors import MixedOperandsError
from shardwise.testing import ranks

MIXED: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda sharded, dtensor: sharded + dtensor,
    "add, the other way": lambda sharded, dtensor: dtensor + sharded,
    "the function": lambda sharded, dtensor: torch.add(dtensor, sharded),
    "a function by keyword": lambda sharded, dtensor: torch.add(sharded, other=dtensor),
    "in place": lambda sharded, dtensor: sharded.add_(dtensor),
    "in place, the other way": lambda sharded, dtensor: dtensor.add_(sharded),
    "out": lambda sharded, dtensor: torch.exp(sharded, out=dtensor),
    "copy": lambda sharded, dtensor: sharded.copy_(dtensor),
    "copy, the other way": lambda sharded, dtensor: dtensor.copy_(sharded),
    "matmul": lambda sharded, dtensor: sharded.t() @ dtensor,
    "matmul, the other way": lambda sharded, dtensor: dtensor.t() @ sharded,
    "linear": lambda sharded, dtensor: linear(dtensor, sharded),
    "linear, the other way": lambda sharded, dtensor: linear(sharded, dtensor),
    "cat": lambda sharded, dtensor: torch.cat([sharded, dtensor]),
    "stack": lambda sharded, dtensor: torch.stack((dtensor, sharded)),
    "where": lambda sharded, dtensor: torch.where(sharded > 0, dtensor, sharded),
    "equal": lambda sharded, dtensor: torch.equal(sharded, dtensor),
    "index": lambda sharded, dtensor: sharded[dtensor > 0],
    "foreach": lambda sharded, dtensor: torch._foreach_add([sharded], [dtensor]),
    "foreach, the other way": lambda sharded, dtensor: torch._foreach_add_([dtensor], [sharded]),
    "one list": lambda sharded, dtensor: torch._foreach_mul_([dtensor, sharded], 2.0),
    "total norm": lambda sharded, dtensor: nn.utils.get_total_norm([dtensor, sharded]),
    "loss": lambda sharded, dtensor: nn.functional.mse_loss(dtensor, sharded),
}


@ranks(2)
def test_no_op_takes_both() -> None:
    """As operators, methods, functions and in lists; neither tensor is changed."""
    line = init_device_mesh("cpu", (2,))
    sharded, dtensor = shard_tensor(PLAIN, chunks(0, 0, 1)), distribute_tensor(PLAIN, line, [Shard(0)])
    for op in MIXED.values():
        told = r"(?s)ShardedTensor and a DTensor.*from_dtensor.*to_dtensor"
        with pytest.raises(MixedOperandsError, match=told):
            op(sharded, dtensor)
    assert torch.equal(sharded.full_tensor(), PLAIN)
    assert torch.equal(dtensor.full_tensor(), PLAIN)
    assert torch.equal((sharded + from_dtensor(dtensor)).full_tensor(), 2 * PLAIN)
    assert torch.equal((sharded.to_dtensor(line) + dtensor).full_tensor(), 2 * PLAIN)


@ranks(2)
def test_nor_beside_what_is_whole_on_every_rank() -> None:
    """Partial and replicated tensors are refused with the same words."""
    dtensor = distribute_tensor(PLAIN, init_device_mesh("cpu", (2,)), [Shard(0)])
    for whole in (PartialTensor(PLAIN), ReplicatedTensor(PLAIN)):
        told = rf"(?s){type(whole).__name__} and a DTensor.*from_dtensor.*to_dtensor"
        for op in (lambda one: one + dtensor, lambda one: dtensor + one, lambda one: torch.cat([dtensor, one])):
            with pytest.raises(MixedOperandsError, match=told):
                op(whole)


@ranks(2)
def test_both_kinds_of_parameters_in_one_optimizer() -> None:
    """A plain torch optimizer steps each on its own; norms and foreach, which join them, are refused."""
    line = init_device_mesh("cpu", (2,))
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        sharded = nn.Parameter(shard_tensor(PLAIN, chunks(0, 0, 1)))
        dtensor = nn.Parameter(distribute_tensor(PLAIN, line, [Shard(0)]))
        plain = nn.Parameter(PLAIN.clone())
        optimizer, twin = kind([sharded, dtensor], lr=0.1), kind([plain], lr=0.1)
        for _ in range(2):
            for one in (sharded, dtensor, plain):
                one.pow(2).sum().backward()
            with pytest.raises(MixedOperandsError, match="from_dtensor"):
                nn.utils.clip_grad_norm_([sharded, dtensor], 1.0)
            optimizer.step(), twin.step()
            optimizer.zero_grad(), twin.zero_grad()
        torch.testing.assert_close(sharded.full_tensor(), plain)
        torch.testing.assert_close(dtensor.full_tensor(), plain)
