"""A sharding said in one line: what it is, what travels for it, and what is refused on every rank."""

from __future__ import annotations

import io
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardwise
from shardwise import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    ReplicatedShardingSpec,
    ShardMetadata,
)
from shardwise.errors import PlainValueError, ShardwiseError, SpecError
from shardwise.layout.placement import all_ranks
from shardwise.layout.specs.fixed import FixedShardingSpec
from shardwise.layout.specs.inference import spec_of
from shardwise.testing import ranks


def sizes(tensor: shardwise.ShardedTensor) -> list[list[int]]:
    """Of all shards."""
    found: list[list[int]] = tensor.sharding.boxes.sizes.tolist()
    return found


@ranks(4)
def test_every_spelling_is_the_same_value() -> None:
    """Values, gradients and layouts of each way to say it; the shards have memory of their own, on the device of x."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    x = torch.randn(7, 5, dtype=torch.float64)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    odd = EnumerableShardingSpec(
        [ShardMetadata([0, 0], [7, 2], "rank:3/cpu"), ShardMetadata([0, 2], [7, 3], "rank:1/cpu")]
    )
    said: list[tuple[tuple[Any, ...], dict[str, Any], list[list[int]]]] = [
        ((0,), {}, [[2, 5], [2, 5], [2, 5], [1, 5]]),
        ((-1,), {}, [[7, 2], [7, 2], [7, 1], [7, 0]]),
        ((None,), {}, [[7, 5]] * 4),
        ((0,), {"weights": [2, 1, 0, 1]}, [[4, 5], [1, 5], [0, 5], [2, 5]]),
        ((mesh, (None, 0)), {}, [[4, 5], [3, 5]] * 2),
        ((mesh, (1, 0)), {}, [[4, 3], [3, 3], [4, 2], [3, 2]]),
        ((mesh, [Replicate(), Shard(1)]), {}, [[7, 3], [7, 2]] * 2),
        ((mesh, 0), {}, [[2, 5], [2, 5], [2, 5], [1, 5]]),
        ((0,), {"weights": np.array([2, 1, 0, 1])}, [[4, 5], [1, 5], [0, 5], [2, 5]]),
        ((0,), {"weights": list(torch.tensor([2.0, 1, 0, 1]))}, [[4, 5], [1, 5], [0, 5], [2, 5]]),
        ((mesh, (None, 0)), {"weights": [3, 1]}, [[5, 5], [2, 5]] * 2),
        ((mesh, [Replicate(), Shard(0)]), {"weights": np.array([3.0, 1])}, [[5, 5], [2, 5]] * 2),
        ((mesh, (0, 1)), {"weights": [[1, 3], None]}, [[2, 3], [2, 2], [5, 3], [5, 2]]),
        ((mesh, (Replicate(), Shard(0))), {"weights": [3, 1]}, [[5, 5], [2, 5]] * 2),
        ((odd,), {}, [[7, 2], [7, 3]]),
    ]
    for how, options, expected in said:
        for src in (None, 2):
            given = x if src is None or rank == src else torch.empty_like(x)
            given = given if src != 2 or rank != 1 else torch.empty(7, 5, dtype=x.dtype, device="meta")
            w = shardwise.shard(given.requires_grad_(), *how, src=src, **options)
            assert sizes(w) == expected
            assert torch.equal(w.full_tensor(), x)
            assert spec_of(w.sharding).layout(x.shape) == w.sharding  # what results of ops, and DTensors, say they are
            assert type(spec_of(w.sharding)) is not FixedShardingSpec
            held = io.BytesIO()
            torch.save([w, w * 1], held)
            held.seek(0)
            for loaded in torch.load(held):
                assert loaded.sharding == w.sharding
                assert torch.equal(loaded.full_tensor(), x)
            (w * x).sum().backward()
            assert torch.equal(w.grad.full_tensor(), x)
            for local in w.local_shards():
                local.tensor.data.zero_()
            assert x.any()
    r = shardwise.replicate(x.detach())
    assert r.sharding == shardwise.replicate(x.detach(), mesh).sharding == shardwise.shard(x, None).sharding
    b = shardwise.from_local(x.detach()[rank : rank + 1])
    assert torch.equal(b.full_tensor(), x[:4])
    moved = shardwise.shard(x.detach(), 0).redistribute(mesh, (None, 1))
    assert moved.sharding == shardwise.shard(x, mesh, (None, 1)).sharding
    assert moved.reshard(1).sharding == shardwise.shard(x, 1).sharding
    assert moved.reshard(mesh, (None, 0)).sharding == shardwise.shard(x, mesh, (None, 0)).sharding
    for weights in ([2, 1, 0, 1], [1, 1, 1, 9]):
        expected = shardwise.shard(x, 0, weights=weights).sharding
        assert moved.redistribute(0, weights=weights).sharding == moved.reshard(0, weights=weights).sharding == expected
        assert torch.equal(moved.full_tensor(), x)
    assert f"{moved.sum():.6f}" == f"{x.sum():.6f}"
    assert f"{moved}" == f"{moved!s}" == repr(moved)
    assert shardwise.zeros(0, 7, 5).sharding == shardwise.shard(x, 0).sharding == ChunkShardingSpec(0).layout((7, 5))
    assert ReplicatedShardingSpec().layout((7,)) == GridShardingSpec([None]).layout((7,))
    assert shardwise.make_plan(shardwise.shard(x, 0).sharding, shardwise.shard(x, 1).sharding).moved > 0


@ranks(4)
def test_only_a_checksum_travels_and_nothing_without_validation() -> None:
    """What is the same everywhere need not be sent; a tensor that is not is an error on every rank."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    with shardwise.trace() as t:
        shardwise.shard(x, 0)
    assert all(event.is_meeting for event in t.events)
    assert 0 < sum(event.sent for event in t.events) < 2048
    with shardwise.validation(False), shardwise.trace() as t:
        shardwise.shard(x, 0)
    assert not t.events
    own = x if rank != 2 else x.clone().index_fill_(0, torch.tensor([63]), 1)
    with pytest.raises(PlainValueError, match=r"on rank 2 its values differ from those on rank 0.*src=0.*from_local"):
        shardwise.shard(own, 0)


@ranks(4)
def test_what_is_refused_is_refused_on_every_rank() -> None:
    """Each with its reason, also where one rank alone is wrong; the group goes on."""
    rank = dist.get_rank()
    x = torch.arange(12.0).reshape(3, 4)
    mesh = init_device_mesh("cpu", (2, 2))
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((2,), {}, "Invalid sharding dim: 2"),
        (("rows",), {}, "Expecting ShardingSpec but got.*a dim that is cut over all ranks"),
        ((True,), {}, "Expecting ShardingSpec"),
        ((mesh,), {}, r"such as \(None, 0\)"),
        ((mesh, (0,)), {}, "needs 2 dims"),
        ((mesh, (0, Partial())), {}, "has replicas"),
        ((0, (0, 1)), {}, "there is none"),
        ((None,), {"weights": [1, 1, 1, 1]}, "replicas cut none"),
        ((0,), {"weights": [1, 1]}, "4 weights"),
        ((0,), {"weights": [[1, 1, 1, 1]]}, "4 weights"),
        ((0,), {"weights": 2}, "a sequence of numbers"),
        ((mesh, (None, 0)), {"weights": 2}, "a sequence of numbers"),
        ((mesh, Shard(0)), {}, "needs 2 dims"),
        ((mesh, True), {}, "needs to be an integer"),
        ((mesh, (0, 1)), {"weights": [1, 1]}, "for each axis"),
        ((ChunkShardingSpec(0),), {"weights": [1]}, "says how to cut"),
        ((0,), {"weights": 4}, "a sequence of numbers"),
        ((0,), {"weights": {0: 1, 1: 1, 2: 1, 3: 1}}, "a sequence of numbers"),
        ((0,), {"weights": "1111"}, "a sequence of numbers"),
        ((0,), {"weights": [float("nan"), 1, 1, 1]}, "numbers >= 0"),
        ((0,), {"weights": [10**400, -1, 0, 0]}, "numbers >= 0"),
    ]
    for how, options, message in wrong:
        with pytest.raises(ValueError, match=message):
            shardwise.shard(x, *how, **options)
        for src in (None, 1):  # one rank alone
            with pytest.raises(ValueError, match=message):
                shardwise.shard(x, *(how if rank == 3 else (0,)), src=src, **(options if rank == 3 else {}))
    with pytest.raises(ValueError, match="src=4 is not a rank of the group"):
        shardwise.shard(x, 0, src=4)
    for src in (None, 0):
        with pytest.raises(ShardwiseError, match="would not go on"):
            shardwise.shard(x.clone().requires_grad_() * (1 if rank else 2), 0, src=src)
    with pytest.raises(ShardwiseError, match="meta device"):
        shardwise.shard(x.to("meta"), ChunkShardingSpec(0, ["rank:1/cpu"]))
    assert shardwise.shard(x.to("meta"), 0).is_meta
    with pytest.raises(ValueError, match="there is none"):
        shardwise.replicate(x, 0 if rank == 1 else None)
    with pytest.raises(TypeError, match="dtype"):
        shardwise.zeros(0, 4, dtype="float32" if rank == 1 else torch.float32)
    with pytest.raises(ShardwiseError, match=r"two layouts, such as x\.sharding.*found ShardedTensor and int"):
        shardwise.make_plan(shardwise.zeros(0, 4), 0)
    with warnings.catch_warnings(action="ignore"):  # deprecated, and still there
        quantised = torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)
    for verb in (partial(shardwise.shard, how=0), partial(shardwise.shard, how=0, src=1), shardwise.from_local):
        with pytest.raises(ShardwiseError, match="plain values, found one that is quantised"):
            verb(quantised)
    with pytest.raises(ShardwiseError):
        shardwise.shard(x if rank else x[:2], 0)
    with pytest.raises(ShardwiseError):
        shardwise.shard(x, 0 if rank else 1)
    with pytest.raises(ShardwiseError, match="strided"):
        shardwise.shard(x.to_sparse(), 0)
    with pytest.raises(ShardwiseError, match="is a plain tensor"):
        shardwise.shard(shardwise.shard(x, 0), 0)
    assert torch.equal(shardwise.shard(x, 0).full_tensor(), x)


@ranks(4)
def test_a_sub_group_and_a_line_of_a_mesh() -> None:
    """Over the ranks of that group; each line of the mesh has its own value."""
    rank = dist.get_rank()
    pair = dist.new_group([1, 3])
    if rank in (1, 3):
        w = shardwise.shard(torch.arange(5.0), 0, process_group=pair)
        assert [place.rank for place in w.sharding.places] == [1, 3]
        assert torch.equal(w.full_tensor(), torch.arange(5.0))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    own = torch.arange(4.0) + rank // 2
    w = shardwise.shard(own, mesh["tp"], (0,))
    assert sizes(w) == [[2], [2]]
    assert torch.equal(w.full_tensor(), own)


@ranks(4)
def test_dtensors_and_specs_say_the_same() -> None:
    """From a spec to placements and back, and over the same memory where both lie alike."""
    mesh = init_device_mesh("cpu", (2, 2))
    x = torch.arange(48.0).reshape(6, 8)
    for placements in ([Replicate(), Shard(0)], [Shard(1), Replicate()], [Shard(0), Shard(1)], [Shard(0), Shard(0)]):
        spec = GridShardingSpec.from_mesh(mesh, placements)
        assert spec.dtensor_placements() == placements
        w = shardwise.shard(x, mesh, placements)
        assert w.sharding_spec() == spec
        d = shardwise.to_dtensor(w, mesh, placements)
        assert isinstance(d, DTensor)
        assert d.to_local().data_ptr() == w.local_tensor().data_ptr()
        assert shardwise.from_dtensor(d).sharding.order_of(w.sharding) is not None
        assert placements == [Shard(0), Shard(0)] or shardwise.from_dtensor(d).sharding_spec() == spec
        assert torch.equal(shardwise.from_dtensor(d, spec).full_tensor(), x)
    with pytest.raises(SpecError, match="cuts evenly"):
        GridShardingSpec.from_mesh(mesh, (0, None), weights=[(1, 2), None]).dtensor_placements()


class Layer(nn.Module):
    """Two projections and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8, dtype=torch.float64)
        self.down = nn.Linear(8, 6, bias=False, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One after the other."""
        made: torch.Tensor = self.down(self.up(x).relu())
        return made


@ranks(4)
def test_a_plan_is_a_dict_of_dims() -> None:
    """Output and gradients are the plain module's; a pattern that matches nothing shows the nearest names."""
    rank = dist.get_rank()
    torch.manual_seed(rank)  # shard_module takes the values of rank 0
    model = nn.Sequential(Layer(), Layer())
    shardwise.shard_module(model, {"*.up.weight": 0, "**.down.weight": 1, "**.bias": None, "1.up.bias": 0})
    torch.manual_seed(0)
    plain = nn.Sequential(Layer(), Layer())
    x = torch.randn(3, 6, dtype=torch.float64)
    y = model(x)
    assert torch.allclose(y.full_tensor() if isinstance(y, shardwise.ShardedTensor) else y, plain(x), rtol=1e-12)
    y.pow(2).sum().backward()
    plain(x).pow(2).sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one.grad.full_tensor(), other.grad, rtol=1e-12)
    assert model[0].up.weight.sharding == shardwise.shard(plain[0].up.weight, 0).sharding
    assert model[0].up.bias.sharding == ReplicatedShardingSpec().layout((8,))
    assert model[1].up.bias.sharding == ChunkShardingSpec(0).layout((8,))
    with pytest.raises(AttributeError, match=r"matches nothing.*did you mean '\*\.up\.weight'"):
        shardwise.shard_module(nn.Sequential(Layer()), {"*.upp.weight": 0})
    with pytest.raises(TypeError, match="Only `ShardingSpec`"):
        shardwise.shard_module(nn.Sequential(Layer()), {"*.up.weight": "rows"})
    mesh = init_device_mesh("cpu", (2, 2))
    for plan, message in (({"": 0}, "the module itself"), ({"**": (mesh, (None, 0))}, "from_mesh")):
        with pytest.raises(ShardwiseError, match=message):
            shardwise.shard_module(nn.Sequential(Layer()), plan)
    for how, expected in ((0, [[1, 4]] * 4), (None, [[4, 4]] * 4)):
        net = nn.Sequential(nn.Linear(4, 4))
        shardwise.shard_module(net, shardwise.ShardingPlan({"0.weight": 0}, output_plan={"0": how}))
        assert sizes(net(torch.ones(4, 4))) == expected
    with torch.device("meta"):
        empty = nn.Sequential(Layer())
    shardwise.shard_module(empty, {"**": 0})
    assert empty[0].up.weight.device.type == "cpu"


def test_without_a_group_placements_must_be_named() -> None:
    """With a message that says so."""
    with pytest.raises(ValueError, match="init_process_group"):
        all_ranks()
