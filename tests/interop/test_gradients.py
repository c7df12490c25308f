"""Gradients go through a conversion as through nothing: those of shards, of replicas, of ranks without any."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, PLAIN, chunks, places
from tests.interop.meshes import MESHES, distributed, is_strided, mesh_of, placements_of
from torch.distributed import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardwise import ReplicatedShardingSpec, ShardingSpec, from_dtensor
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

WEIGHT = torch.linspace(-1, 2, 42).reshape(7, 6)


def wanted(value: torch.Tensor) -> torch.Tensor:
    """The gradient of the sum of weighted squares."""
    plain = value.clone().requires_grad_()
    (plain.pow(2) * WEIGHT).sum().backward()
    assert plain.grad is not None
    return plain.grad


def same(found: Any, expected: torch.Tensor) -> bool:
    """Whether a gradient is there and is this one, on every rank."""
    assert found is not None
    torch.testing.assert_close(found.full_tensor(), expected)
    if isinstance(found, DTensor):
        return not any(isinstance(placement, Partial) for placement in found.placements)
    index = [
        tuple(slice(o, o + s) for o, s in zip(m.metadata.shard_offsets, m.metadata.shard_sizes, strict=True))
        for m in found.local_shards()
    ]
    return all(torch.allclose(m.tensor, expected[i]) for m, i in zip(found.local_shards(), index, strict=True))


@pytest.mark.parametrize("name", MESHES)
@ranks(4)
def test_from_a_dtensor(name: str) -> None:
    """Computed on the sharded side; the DTensor gets the gradient that torch gives it, whole on every replica."""
    mesh = mesh_of(name)
    inside = dist.get_rank() in mesh.mesh
    twin = distributed(name, mesh=mesh).requires_grad_()
    if inside:
        try:
            twin.to_local().backward(distributed(name, wanted(PLAIN), mesh=mesh).to_local())
        except ValueError:
            pytest.skip("this torch cannot accumulate the gradient of such a DTensor")
    for spec in (None, ReplicatedShardingSpec(places(*mesh.mesh.flatten().tolist()))):
        dtensor = distributed(name, mesh=mesh).requires_grad_()
        made = from_dtensor(dtensor, spec)
        assert made.requires_grad
        if inside:
            (made.pow(2) * WEIGHT).sum().backward()
            assert dtensor.grad is not None
            assert twin.grad is not None
            assert dtensor.grad.placements == twin.grad.placements
            assert torch.equal(dtensor.grad.to_local(), twin.grad.to_local())


@pytest.mark.parametrize("name", [name for name in MESHES if not is_strided(name)])
@ranks(4)
def test_to_a_dtensor(name: str) -> None:
    """Computed on DTensor's side, of a leaf and of a result; every rank runs the backward, in the mesh or not."""
    mesh = mesh_of(name)
    weight = distributed(name, WEIGHT, mesh=mesh)
    for layout in ("chunk dim 0", "uneven, several per rank", "replicated", "all on one rank"):
        leaf = shard_tensor(PLAIN, ALL[layout]).requires_grad_()
        (leaf.to_dtensor(mesh, placements_of(name)).pow(2) * weight).sum().backward()
        assert same(leaf.grad, wanted(PLAIN)), layout
        leaf = shard_tensor(PLAIN, ALL[layout]).requires_grad_()
        ((leaf * 3).to_dtensor(mesh, placements_of(name)).pow(2) * weight).sum().backward()
        assert same(leaf.grad, 3 * wanted(3 * PLAIN)), layout


@pytest.mark.parametrize("spec", [chunks(0, 0, 1), ReplicatedShardingSpec(places(0, 1))], ids=["rows", "replicated"])
@ranks(2)
def test_there_and_back(spec: ShardingSpec) -> None:
    """A leaf that is used on both sides, in replicas on both, gets the sum of what comes back."""
    line = init_device_mesh("cpu", (2,))
    for placement in (Shard(0), Shard(1), Replicate()):
        leaf = shard_tensor(PLAIN, spec).requires_grad_()
        there = leaf.to_dtensor(line, [placement]) * 2
        back = from_dtensor(there) * leaf
        (back * WEIGHT).sum().backward()
        assert same(leaf.grad, 2 * wanted(PLAIN))
        dleaf = distribute_tensor(PLAIN, line, [placement]).requires_grad_()
        there = (from_dtensor(dleaf) * 2).to_dtensor(line, [placement])
        (there * dleaf * distribute_tensor(WEIGHT, line, [placement])).sum().backward()
        assert same(dleaf.grad, 2 * wanted(PLAIN))


@ranks(2)
def test_replicas_that_already_lie_alike_count_once() -> None:
    """A replicated result, converted without moving, and a replicated DTensor computed on by replicated operands."""
    line, both = init_device_mesh("cpu", (2,)), ReplicatedShardingSpec(places(0, 1))
    leaf, other = (shard_tensor(PLAIN, both).requires_grad_() for _ in range(2))
    ((leaf * other).to_dtensor(line) * distribute_tensor(WEIGHT, line, [Replicate()])).sum().backward()
    for one in (leaf, other):
        assert same(one.grad, PLAIN * WEIGHT)
    dleaf, weight = distribute_tensor(PLAIN, line, [Replicate()]).requires_grad_(), shard_tensor(WEIGHT, both)
    (from_dtensor(dleaf).pow(2) * weight).sum().backward()
    assert same(dleaf.grad, wanted(PLAIN))


@ranks(2)
def test_a_partial_sum() -> None:
    """Each rank's part gets the gradient of the sum."""
    line = init_device_mesh("cpu", (2,))
    local = (PLAIN / 2).requires_grad_()
    made = from_dtensor(DTensor.from_local(local, line, [Partial()]))
    (made.pow(2) * WEIGHT).sum().backward()
    torch.testing.assert_close(local.grad, wanted(PLAIN))


@ranks(2)
def test_asked_for_by_name() -> None:
    """`torch.autograd.grad` and `backward(inputs=...)` reach a leaf of either kind from a result of the other."""
    line = init_device_mesh("cpu", (2,))
    leaf = shard_tensor(PLAIN, chunks(0, 0, 1)).requires_grad_()
    dleaf = distribute_tensor(PLAIN, line, [Shard(0)]).requires_grad_()
    weight = distribute_tensor(WEIGHT, line, [Shard(0)])
    (found,) = torch.autograd.grad((leaf.to_dtensor(line).pow(2) * weight).sum(), leaf)
    assert same(found, wanted(PLAIN))
    (found,) = torch.autograd.grad((from_dtensor(dleaf).pow(2) * WEIGHT).sum(), dleaf)
    assert isinstance(found, DTensor)
    assert same(found, wanted(PLAIN))
    (from_dtensor(dleaf).pow(2) * leaf * WEIGHT).sum().backward(inputs=[dleaf])
    assert leaf.grad is None
    assert same(dleaf.grad, wanted(PLAIN) * PLAIN)


@ranks(2)
def test_without_recording() -> None:
    """Neither under no_grad nor of what wants no gradient."""
    line = init_device_mesh("cpu", (2,))
    leaf = shard_tensor(PLAIN, chunks(0, 0, 1)).requires_grad_()
    with torch.no_grad():
        assert not leaf.to_dtensor(line).requires_grad
    assert not leaf.detach().to_dtensor(line, [Shard(1)]).requires_grad
    assert leaf.to_dtensor(line).requires_grad
