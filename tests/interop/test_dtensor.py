"""DTensors become sharded tensors and back: the same memory where they lie alike, a transfer where not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, PLAIN, SIZE, chunks, holds, places
from tests.interop.meshes import MESHES, distributed, is_strided, mesh_of, placements_of
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement as Placing

import shardwise
from shardwise import ReplicatedShardingSpec, ShardedTensor, from_dtensor, to_dtensor
from shardwise.errors import PlacementError, ProcessGroupError, PropertyError, RankMismatchError, SpecError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks


def memory(tensor: torch.Tensor) -> int:
    """Where its data begins."""
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", MESHES)
@ranks(4)
def test_a_dtensor_lies_as_it_did(name: str) -> None:
    """Every shard is its part of the tensor, in the DTensor's own memory: what is written into one is in the other."""
    dtensor = distributed(name)
    made = from_dtensor(dtensor)
    assert type(made) is ShardedTensor
    assert made.shape == PLAIN.shape
    assert made.dtype == PLAIN.dtype
    assert holds(made, PLAIN)
    inside = dist.get_rank() in dtensor.device_mesh.mesh
    assert len(made.local_shards()) >= inside
    assert all(
        memory(shard.tensor) == memory(dtensor.to_local()) for shard in made.local_shards() if shard.tensor.numel()
    )
    if inside:
        assert torch.equal(made.full_tensor(), PLAIN)
        made.add_(1)
        assert torch.equal(from_dtensor(dtensor).full_tensor(), PLAIN + 1)


@pytest.mark.parametrize("name", MESHES)
@ranks(4)
def test_and_back(name: str) -> None:
    """The DTensor that it came from, in the same memory again unless a rank holds several stretches of it."""
    dtensor = distributed(name)
    made = from_dtensor(dtensor)
    back = made.to_dtensor(dtensor.device_mesh, dtensor.placements)
    assert back.placements == dtensor.placements
    assert back.shape == dtensor.shape
    assert back.stride() == dtensor.stride()
    assert torch.equal(back.to_local(), dtensor.to_local())
    if len(made.local_shards()) == 1 and made.local_tensor().numel():
        assert back.to_local().data_ptr() == dtensor.to_local().data_ptr()


@pytest.mark.parametrize("name", MESHES)
@ranks(4)
def test_any_layout_goes_to_any_mesh(name: str) -> None:
    """By a transfer where the two differ; a rank outside of the mesh has a DTensor without data."""
    mesh = mesh_of(name)
    expected = distributed(name, mesh=mesh)
    for spec in ALL.values():
        dtensor = shard_tensor(PLAIN, spec).to_dtensor(mesh, placements_of(name))
        assert isinstance(dtensor, DTensor)
        assert dtensor.placements == expected.placements
        assert dtensor.shape == PLAIN.shape
        assert torch.equal(dtensor.to_local(), expected.to_local())
        if dist.get_rank() in mesh.mesh and not is_strided(name):
            assert torch.equal(dtensor.full_tensor(), PLAIN)


@pytest.mark.parametrize("name", ["rows", "replicated", "grid, dims exchanged", "in stretches", "replicas of rows"])
@ranks(4)
def test_any_dtensor_goes_to_any_spec(name: str) -> None:
    """The spec given is the one the tensor has."""
    dtensor = distributed(name)
    for spec in ALL.values():
        made = from_dtensor(dtensor, spec)
        assert made.sharding_spec() == spec
        assert holds(made, PLAIN)


@ranks(4)
def test_a_dtensor_of_some_ranks_goes_to_others() -> None:
    """If they are in the group that is given, and all of it calls."""
    dtensor = distributed("two of four ranks")
    for spec in ALL.values():
        made = from_dtensor(dtensor, spec, process_group=dist.group.WORLD)
        assert holds(made, PLAIN)


@ranks(4)
def test_a_spec_that_agrees_moves_nothing() -> None:
    """Even when it lists the ranks in another order."""
    dtensor = distributed("grid")
    boxes = [from_dtensor(dtensor).metadata().shards_metadata[k] for k in (3, 1, 0, 2)]
    made = from_dtensor(dtensor, shardwise.EnumerableShardingSpec(boxes))
    assert made.local_tensor().data_ptr() == dtensor.to_local().data_ptr()
    assert holds(made, PLAIN)
    assert made.to_dtensor(dtensor.device_mesh).to_local().data_ptr() == dtensor.to_local().data_ptr()


@ranks(4)
def test_placements_are_found_by_how_the_tensor_lies() -> None:
    """Chunks, grids, replicas, and what came from a DTensor."""
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    grid = shardwise.GridShardingSpec((1, 0), [places(0, 1), places(2, 3)])
    expected: list[tuple[shardwise.ShardingSpec, DeviceMesh, list[Placing]]] = [
        (chunks(0, 0, 1, 2, 3), line, [Shard(0)]),
        (chunks(-1, 0, 1, 2, 3), line, [Shard(1)]),
        (ReplicatedShardingSpec(places(3, 2, 1, 0)), line, [Replicate()]),
        (grid, square, [Shard(1), Shard(0)]),
        (chunks(1, 1, 3), DeviceMesh("cpu", [1, 3]), [Shard(1)]),
        (chunks(1, 2), DeviceMesh("cpu", [2]), [Shard(1)]),
        (ReplicatedShardingSpec(places(2)), DeviceMesh("cpu", [2]), [Replicate()]),
    ]
    for spec, mesh, placements in expected:
        tensor = shard_tensor(PLAIN, spec)
        found = to_dtensor(tensor, mesh)
        assert list(found.placements) == placements
        if tensor.local_shards():
            assert found.to_local().data_ptr() == tensor.local_tensor().data_ptr()
    for name in ("replicas of rows", "rows in replicas", "rows of rows"):
        dtensor = distributed(name)
        assert from_dtensor(dtensor).to_dtensor(dtensor.device_mesh).placements == dtensor.placements
    with pytest.raises(
        SpecError, match=r"no placements on .* describe how this tensor lies.*to_dtensor\(mesh, \[Shard"
    ):
        shard_tensor(PLAIN, ALL["uneven, several per rank"]).to_dtensor(line)


@pytest.mark.parametrize("size", [(0, 4), (1,), (5, 0, 3), (2, 3), ()])
@ranks(4)
def test_odd_sizes(size: tuple[int, ...]) -> None:
    """No elements, fewer than ranks, no dims."""
    plain = torch.arange(float(torch.Size(size).numel())).reshape(size)
    line = init_device_mesh("cpu", (4,))
    for placement in [Replicate(), *map(Shard, range(len(size)))]:
        dtensor = distribute_tensor(plain, line, [placement])
        made = from_dtensor(dtensor)
        assert made.shape == plain.shape
        assert torch.equal(made.full_tensor(), plain)
        back = made.to_dtensor(line, [placement])
        assert back.shape == plain.shape
        assert torch.equal(back.full_tensor(), plain)
        assert torch.equal(from_dtensor(back, ReplicatedShardingSpec(places(1))).full_tensor(), plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@ranks(2)
def test_every_dtype(dtype: torch.dtype) -> None:
    """Moved or not."""
    plain, line = torch.arange(6).reshape(3, 2).to(dtype), init_device_mesh("cpu", (2,))
    made = from_dtensor(distribute_tensor(plain, line, [Shard(0)]), chunks(1, 1, 0))
    assert made.dtype == dtype
    assert torch.equal(made.to_dtensor(line, [Shard(0)]).full_tensor(), plain)


@pytest.mark.parametrize("reduce_op", ["sum", "avg", "max", "min", "product"])
@ranks(4)
def test_a_partial_dtensor_is_reduced(reduce_op: str) -> None:
    """On one axis of a mesh, with shards on the other; the value is torch's own."""
    square = init_device_mesh("cpu", (2, 2))
    local = torch.arange(6.0).reshape(3, 2) + 10 * dist.get_rank() + 1
    dtensor = DTensor.from_local(local, square, [Shard(0), Partial(reduce_op)])
    expected = dtensor.full_tensor()
    made = from_dtensor(dtensor)
    assert torch.equal(made.full_tensor(), expected)
    assert made.sharding_spec().layout(made.shape).has_replicas
    assert torch.equal(from_dtensor(dtensor, chunks(1, 3, 0)).full_tensor(), expected)


@ranks(4)
def test_a_mesh_in_a_mesh() -> None:
    """Each half of the ranks has a DTensor of its own, on two axes of a mesh of three; neither waits for the other."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("stage", "data", "model"))
    stage = dist.get_rank() // 2
    dtensor = distribute_tensor(PLAIN + stage, mesh["data", "model"], [Shard(0), Shard(1)])
    made = from_dtensor(dtensor)
    again = from_dtensor(dtensor)
    assert dist.get_process_group_ranks(made._process_group) == [2 * stage, 2 * stage + 1]
    assert made._process_group is again._process_group
    if stage:  # the other half does nothing more
        assert torch.equal((made + again).full_tensor(), 2 * PLAIN + 2)
        assert torch.equal(made.to_dtensor(mesh["data", "model"], [Replicate(), Shard(0)]).full_tensor(), PLAIN + 1)


@ranks(4)
def test_placements_of_what_fsdp_cuts_after_others() -> None:
    """A dim that the last axis has cut first; and an axis of one rank cuts nothing."""
    square, flat = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (1, 4))
    for name in ("rows, strided", "columns, strided"):
        made = from_dtensor(distributed(name, mesh=square))
        assert list(made.to_dtensor(square).placements) == placements_of(name)
    assert list(shard_tensor(PLAIN, chunks(0, 0, 1, 2, 3)).to_dtensor(flat).placements) == [Replicate(), Shard(0)]


@ranks(4)
def test_a_tensor_of_some_ranks_goes_to_a_mesh_of_others() -> None:
    """By way of a group that has all of them; until then every rank that must know is told, and nobody waits."""
    group, mesh = dist.new_group([0, 1, 2]), DeviceMesh("cpu", [1, 3])
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1), process_group=group)
    if dist.get_rank() != 3:
        with pytest.raises(ProcessGroupError, match=r"ranks \[3\] of .* process_group=dist.group.WORLD"):
            tensor.to_dtensor(mesh, [Shard(1)])
    else:
        with pytest.raises(ProcessGroupError, match=r"ranks \[3\] of "):
            tensor.to_dtensor(mesh, [Shard(1)])
    inside = tensor.to_dtensor(DeviceMesh("cpu", [0, 2]), [Shard(1)])  # of the group, but not all of it holds shards
    assert inside.to_local().numel() == (21 if dist.get_rank() in (0, 2) else 0)
    everywhere = tensor.redistribute(chunks(0, 0, 1), process_group=dist.group.WORLD)
    dtensor = everywhere.to_dtensor(mesh, [Shard(1)])
    if dist.get_rank() in (1, 3):
        assert torch.equal(dtensor.full_tensor(), PLAIN)


@ranks(2)
def test_parameters() -> None:
    """A parameter becomes a tensor over its memory, under no_grad one without a graph."""
    line = init_device_mesh("cpu", (2,))
    dtensor = torch.nn.Parameter(distribute_tensor(PLAIN, line, [Shard(0)]))
    with torch.no_grad():
        made = from_dtensor(dtensor)
        made.zero_()
    assert not made.requires_grad
    assert not dtensor.full_tensor().any()
    parameter = torch.nn.Parameter(shard_tensor(PLAIN, chunks(0, 0, 1)))
    back = torch.nn.Parameter(parameter.detach().to_dtensor(line))
    assert back.is_leaf
    assert back.to_local().data_ptr() == parameter.local_tensor().data_ptr()


@ranks(2)
def test_without_data() -> None:
    """Tensors on the meta device have a layout, and nothing to move."""
    line = init_device_mesh("cpu", (2,))
    tensor = shardwise.empty(shardwise.ChunkShardingSpec(0, places(0, 1, device="meta")), 7, 6)
    dtensor = tensor.to_dtensor(line)
    assert dtensor.to_local().is_meta
    assert tensor.to_dtensor(line, [Shard(1)]).to_local().shape == (7, 3)
    made = from_dtensor(dtensor)
    assert made.is_meta
    assert made.sharding_spec() == tensor.sharding_spec()


@ranks(2)
def test_what_cannot_be_converted_is_refused() -> None:
    """On every rank, with what to do instead."""
    line = init_device_mesh("cpu", (2,))
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1))
    with pytest.raises(SpecError, match=r"has a value and cannot become \[Partial\(sum\)\]: ask for Replicate\(\)"):
        tensor.to_dtensor(line, [Partial()])
    with pytest.raises(SpecError, match="a mesh of 1 axes needs 1 placements"):
        tensor.to_dtensor(line, [Shard(0), Shard(1)])
    with pytest.raises(SpecError, match="Invalid sharding dim"):
        tensor.to_dtensor(line, [Shard(2)])
    with pytest.raises(SpecError, match="needs a DeviceMesh"):
        tensor.to_dtensor("cpu", [Shard(0)])
    with pytest.raises(SpecError, match=r"a placement should be Shard\(dim\), .*found 'rows'"):
        tensor.to_dtensor(line, ["rows"])
    turned = DeviceMesh("cpu", [1, 0])
    for convert in (
        lambda: tensor.to_dtensor(turned, [Shard(1)]),
        lambda: from_dtensor(distribute_tensor(PLAIN, turned, [Shard(0)])),
    ):
        with pytest.raises(SpecError, match=r"axis 0 of the mesh \[1, 0\] is not in ascending order"):
            convert()
    dtensor = tensor.to_dtensor(line)
    with pytest.raises(PropertyError, match="to_dtensor takes a ShardedTensor"):
        to_dtensor(PLAIN if dist.get_rank() else tensor, line)
    with pytest.raises(PropertyError, match="from_dtensor takes a DTensor"):
        from_dtensor(PLAIN if dist.get_rank() else dtensor)
    with pytest.raises(SpecError, match="Expecting ShardingSpec"):
        from_dtensor(dtensor, [Shard(0)])
    with pytest.raises(PlacementError, match="Global rank 5 does not exist"):
        from_dtensor(dtensor, chunks(0, 0, 5))
    with pytest.raises(ProcessGroupError, match="not all ranks of the mesh"):
        from_dtensor(dtensor, process_group=[dist.new_group([k]) for k in (0, 1)][dist.get_rank()])
    lopsided = DTensor.from_local(torch.ones(2 + dist.get_rank()), line, [Shard(0)], shape=(5,), stride=(1,))
    with pytest.raises(PropertyError, match=r"has \[3\] on rank 0, but its local tensor there has size \[2\]"):
        from_dtensor(lopsided)
    for reduce_op in ("avg", "max"):
        wants_grad = DTensor.from_local(torch.ones(2, requires_grad=True), line, [Partial(reduce_op)])
        with pytest.raises(PropertyError, match="the gradient of a sum"):
            from_dtensor(wants_grad)
        with torch.no_grad():
            assert torch.equal(from_dtensor(wants_grad).full_tensor(), torch.ones(2))


@ranks(2)
def test_ranks_that_ask_for_different_things_find_out() -> None:
    """Both raise, though only one asks for a transfer."""
    line = init_device_mesh("cpu", (2,))
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1))
    with pytest.raises(RankMismatchError, match="placements"):
        tensor.to_dtensor(line, [Shard(dist.get_rank())])
    with pytest.raises(RankMismatchError, match="sharding_spec"):
        from_dtensor(tensor.to_dtensor(line), [None, chunks(1, 0, 1)][dist.get_rank()])
    uneven = DTensor.from_local(torch.ones(2 + dist.get_rank()), line, [Shard(0)])  # whose sizes do not agree
    with pytest.raises(RankMismatchError, match="global_size"):
        from_dtensor(uneven)
    assert tuple(tensor.shape) == SIZE
