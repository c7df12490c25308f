"""A sharded tensor and a DTensor in one op: every rank raises an error that says how to convert."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import PLAIN, assert_close, chunks
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.functional import linear

import shardwise
from shardwise import ShardedTensor, from_dtensor
from shardwise.errors import MixedOperandsError, PropertyError, SpecError, UnsupportedOpError
from shardwise.tensor import shard_tensor
from shardwise.tensor.partial import PartialTensor, ReplicatedTensor
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
    """A plain torch optimizer steps each on its own, also those in one list; norms, which join them, are refused."""
    line = init_device_mesh("cpu", (2,))
    for kind in (torch.optim.SGD, torch.optim.AdamW, functools.partial(torch.optim.AdamW, foreach=True)):
        values = PLAIN.double()
        sharded = nn.Parameter(shard_tensor(values, chunks(0, 0, 1)))
        dtensor = nn.Parameter(distribute_tensor(values, line, [Shard(0)]))
        plain = nn.Parameter(values.clone())
        optimizer, twin = kind([sharded, dtensor], lr=0.1), kind([plain], lr=0.1)
        for _ in range(2):
            for one in (sharded, dtensor, plain):
                one.pow(2).sum().backward()
            with pytest.raises(MixedOperandsError, match="from_dtensor"):
                nn.utils.clip_grad_norm_([sharded, dtensor], 1.0)
            optimizer.step(), twin.step()
            optimizer.zero_grad(), twin.zero_grad()
        assert_close(sharded.full_tensor(), plain)
        assert_close(dtensor.full_tensor(), plain)


TAKING: dict[str, Callable[[Any], Any]] = {
    "shard_tensor": lambda tensor: shard_tensor(tensor, chunks(0, 0, 1)),
    "spec.shard": lambda tensor: chunks(0, 0, 1).shard(tensor),
    "Shard": lambda tensor: shardwise.tensor.Shard(tensor, shardwise.ShardMetadata([0, 0], tensor.shape, "rank:0/cpu")),
    "from_tensor_and_offsets": lambda tensor: shardwise.tensor.Shard.from_tensor_and_offsets(tensor, [0, 0], 0),
    "a local tensor": lambda tensor: ShardedTensor._init_from_local_tensor(tensor, chunks(0, 0, 1), 14, 6),
    "PartialTensor": PartialTensor,
    "ReplicatedTensor": ReplicatedTensor,
}


@ranks(2)
def test_what_is_made_of_plain_tensors_is_made_of_no_other() -> None:
    """Every rank is told at once how to convert: nobody waits for the others, and the group goes on working."""
    sharded, dtensor = shard_tensor(PLAIN, chunks(0, 0, 1)), distribute_tensor(PLAIN, init_device_mesh("cpu", (2,)))
    for name, make in TAKING.items():
        with pytest.raises(PropertyError, match=r"is a plain tensor, found DTensor.*shardwise\.from_dtensor"):
            make(dtensor)
        with pytest.raises(PropertyError, match=r"is a plain tensor, found ShardedTensor.*redistribute\(spec\)"):
            make(sharded)
        assert torch.equal(sharded.full_tensor(), PLAIN), name


@ranks(2)
def test_torch_does_not_take_a_sharded_tensor_for_a_local_one() -> None:
    """Neither DTensor nor a collective: the error names what does it."""
    mesh = init_device_mesh("cpu", (2,))
    sharded = shard_tensor(PLAIN, chunks(0, 0, 1))
    with pytest.raises(MixedOperandsError, match=r"shardwise\.to_dtensor\(tensor, mesh, placements\)"):
        DTensor.from_local(sharded, mesh, [Shard(0)])
    for placement in (Shard(0), Replicate()):
        with pytest.raises(UnsupportedOpError, match=r"to_dtensor\(mesh, placements\)"):
            distribute_tensor(sharded, mesh, [placement])
    for collective in (dist.all_reduce, lambda tensor: dist.broadcast(tensor, 0)):
        with pytest.raises(UnsupportedOpError, match="lies on all ranks already"):
            collective(sharded)
    assert torch.equal(sharded.full_tensor(), PLAIN)


@ranks(2)
def test_a_placement_that_is_none_is_shown() -> None:
    """As it was given, beside the others."""
    sharded = shard_tensor(PLAIN, chunks(0, 0, 1))
    with pytest.raises(SpecError, match=r"should be Shard\(dim\), .*found 'Shard\(0\)' among \['Shard\(0\)'\]"):
        sharded.to_dtensor(init_device_mesh("cpu", (2,)), ["Shard(0)"])
