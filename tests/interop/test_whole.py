"""Partial and replicated tensors as DTensors: without moving anything, or reduced into the placements asked for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.cases import PLAIN
from torch.distributed import DeviceMesh, ReduceOp, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardwise import to_dtensor
from shardwise.errors import ProcessGroupError, PropertyError, RankMismatchError, SpecError
from shardwise.tensor.partial import PartialTensor, ReplicatedTensor
from shardwise.testing import ranks

REDUCTIONS = {"sum": ReduceOp.SUM, "avg": ReduceOp.AVG, "max": ReduceOp.MAX, "min": ReduceOp.MIN}
WEIGHT = torch.linspace(-1, 2, 42).reshape(7, 6)


@pytest.mark.parametrize("reduce_op", REDUCTIONS)
@ranks(4)
def test_a_partial_tensor(reduce_op: str) -> None:
    """It is the parts of a DTensor on a mesh of any shape, or reduced into shards and replicas."""
    part = PartialTensor(PLAIN + dist.get_rank(), reduce_op=REDUCTIONS[reduce_op])
    expected = part.full_tensor()
    for shape in ((4,), (2, 2)):
        mesh = init_device_mesh("cpu", shape)
        dtensor = to_dtensor(part, mesh)
        assert list(dtensor.placements) == [Partial(reduce_op)] * len(shape)
        assert dtensor.to_local().data_ptr() == part._local.data_ptr()
        torch.testing.assert_close(dtensor.full_tensor(), expected)
    for placements in ([Shard(0), Replicate()], [Shard(1), Shard(0)], [Replicate(), Replicate()]):
        dtensor = to_dtensor(part, mesh, placements)
        assert list(dtensor.placements) == placements
        torch.testing.assert_close(dtensor.full_tensor(), expected)


@ranks(2)
def test_a_replicated_tensor() -> None:
    """It is replicas, which share its memory, or what each rank keeps of them."""
    line, whole = init_device_mesh("cpu", (2,)), ReplicatedTensor(PLAIN)
    dtensor = to_dtensor(whole, line)
    assert list(dtensor.placements) == [Replicate()]
    assert dtensor.to_local().data_ptr() == whole.data_ptr()
    assert type(dtensor.to_local()) is torch.Tensor
    assert torch.equal(to_dtensor(whole, line, [Shard(1)]).full_tensor(), PLAIN)


@ranks(2)
def test_gradients() -> None:
    """Every part of a sum gets the gradient of the sum, every replica the whole one."""
    line = init_device_mesh("cpu", (2,))
    for placements in (None, [Shard(0)], [Replicate()]):
        part, whole = ((PLAIN / 2).requires_grad_(), PLAIN.clone().requires_grad_())
        for leaf, tensor in ((part, PartialTensor(part)), (whole, ReplicatedTensor(whole))):
            made = to_dtensor(tensor, line, placements)
            weight = DTensor.from_local(WEIGHT, line, [Replicate()])
            (made.redistribute(placements=[Replicate()]).pow(2) * weight).sum().backward()
            torch.testing.assert_close(leaf.grad, 2 * PLAIN * WEIGHT)


@ranks(2)
def test_what_is_refused() -> None:
    """On every rank, whichever asks for it."""
    line, part = init_device_mesh("cpu", (2,)), PartialTensor(PLAIN)
    with pytest.raises(SpecError, match=r"cannot become \[Partial\(max\)\]"):
        to_dtensor(part, line, [Partial("max")])
    with pytest.raises(SpecError, match=r"ReplicatedTensor.*cannot become \[Partial\(sum\)\]"):
        to_dtensor(ReplicatedTensor(torch.ones(1)), line, [Partial()])
    with pytest.raises(ProcessGroupError, match=r"the mesh has ranks \[1\], PartialTensor.* ranks \[0, 1\]"):
        to_dtensor(part, DeviceMesh("cpu", [1]))
    with pytest.raises(RankMismatchError, match="placements"):
        to_dtensor(part, line, [[Shard(0)], None][dist.get_rank()])
    with pytest.raises(PropertyError, match="the gradient of a sum"):
        to_dtensor(PartialTensor(PLAIN.clone().requires_grad_(), reduce_op=ReduceOp.AVG), line)
