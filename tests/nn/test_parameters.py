"""`shard_parameter`: one parameter of a module, replaced by a sharded one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, PLAIN, SPECS, chunks, holds, places
from torch import nn

from shardwise import ChunkShardingSpec, ReplicatedShardingSpec, ShardedTensor
from shardwise.errors import ProcessGroupError, PropertyError, RankMismatchError
from shardwise.nn import shard_parameter
from shardwise.testing import ranks

ROWS = chunks(0, 0, 1)


def layer(seed: int = 0) -> nn.Linear:
    """A layer with a weight of the size that the specs of the tests cut."""
    torch.manual_seed(seed)
    return nn.Linear(6, 7)


@pytest.mark.parametrize("layout", ALL)
@ranks(4)
def test_the_parameter_is_cut_by_the_spec(layout: str) -> None:
    """It is a parameter and a sharded tensor, holds its part of the source's values, and nothing else changes."""
    module = layer(dist.get_rank())
    bias = module.bias
    shard_parameter(module, "weight", ALL[layout], src_rank=1)
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, ShardedTensor)
    assert holds(weight, layer(1).weight.detach())
    assert weight.sharding_spec() == ALL[layout]
    assert (weight.requires_grad, weight.is_leaf, weight.dtype) == (True, True, torch.float32)
    assert module.bias is bias
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]


@ranks(2)
def test_what_is_frozen_stays_frozen_and_attributes_stay() -> None:
    """requires_grad, and what others hung on the parameter."""
    module = layer().requires_grad_(False)
    module.weight.decay = 0.5
    shard_parameter(module, "weight", ROWS)
    assert not module.weight.requires_grad
    assert module.weight.decay == 0.5
    whole_numbers = nn.Module()
    whole_numbers.register_parameter("table", nn.Parameter(torch.arange(6), requires_grad=False))
    shard_parameter(whole_numbers, "table", ROWS)
    assert whole_numbers.table.dtype == torch.int64


@ranks(2)
def test_a_name_may_lead_into_submodules() -> None:
    """And into lists of parameters; ties inside the module are kept."""
    inner = nn.Linear(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(inner))
    model[0].weight = inner.weight
    shard_parameter(model, "1.0.weight", ROWS)
    assert model[0].weight is inner.weight
    assert isinstance(model[0].weight, ShardedTensor)
    several = nn.ParameterList([torch.zeros(4), torch.ones(4)])
    shard_parameter(several, "1", ROWS)
    assert torch.equal(several[1].full_tensor(), torch.ones(4))
    recurrent = nn.GRU(4, 4)
    shard_parameter(recurrent, "weight_hh_l0", ROWS)
    assert recurrent._flat_weights[1] is recurrent.weight_hh_l0


@ranks(2)
def test_without_data_the_shards_are_made_empty() -> None:
    """On the devices of the placements."""
    module = nn.Linear(6, 7, device="meta", dtype=torch.float64)
    shard_parameter(module, "weight", ROWS)
    assert module.weight.local_tensor().device == torch.device("cpu")
    assert module.weight.dtype == torch.float64
    nn.init.ones_(module.weight)
    assert (module.weight == 1).all().item()
    onto_meta = layer()
    shard_parameter(onto_meta, "weight", ChunkShardingSpec(0, places(0, 1, device="meta")))
    assert onto_meta.weight.is_meta


@ranks(4)
def test_a_sharded_parameter_is_resharded_in_place() -> None:
    """The same object, with its gradient; a spec that it already has changes nothing."""
    module = nn.Linear(6, 7)
    module.weight = nn.Parameter(PLAIN.clone())
    shard_parameter(module, "weight", SPECS["chunk dim 0"])
    weight = module.weight
    (weight * weight).sum().backward()
    shard_parameter(module, "weight", SPECS["uneven, several per rank"])
    assert module.weight is weight
    assert holds(weight, PLAIN)
    assert holds(weight.grad, 2 * PLAIN)
    before = [shard.tensor for shard in weight.local_shards()]
    shard_parameter(module, "weight", SPECS["uneven, several per rank"])
    assert all(one is other.tensor for one, other in zip(before, weight.local_shards(), strict=True))


@ranks(4)
def test_a_sub_group() -> None:
    """The source is a rank of the group; outsiders may call too, and hold nothing."""
    group = dist.new_group([3, 1])
    module = layer(dist.get_rank())
    shard_parameter(module, "weight", chunks(0, 1, 3), src_rank=1, process_group=group)
    assert len(module.weight.local_shards()) == (dist.get_rank() in (1, 3))
    assert holds(module.weight, layer(3).weight.detach())
    if dist.get_rank() in (1, 3):
        again = layer()
        with pytest.raises(ValueError, match=r"Global rank 2 does not exist in input process group: \[1, 3\]"):
            shard_parameter(again, "weight", chunks(0, 1, 2), process_group=group)
        with pytest.raises(ValueError, match="src_rank=2 is not a rank of the group"):
            shard_parameter(again, "weight", chunks(0, 1, 3), src_rank=2, process_group=group)
        assert type(again.weight) is nn.Parameter
    everywhere = ReplicatedShardingSpec(places(0, 1, 2, 3))
    with pytest.raises(ProcessGroupError, match="already sharded, over another process group"):
        shard_parameter(module, "weight", everywhere)


class Odd(nn.Module):
    """Attributes that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words = "words"
        self.plain = torch.arange(4.0, requires_grad=True)
        self.tilted = torch.zeros(4, 6).t()
        self.inner = nn.Linear(2, 2, bias=False)
        self.slanted = nn.Parameter(torch.zeros(4, 6).t())
        self.weight = nn.Parameter(torch.zeros(4, 6))
        self.lazy = nn.LazyLinear(3)
        self.register_buffer("running", torch.arange(4))
        self.inner.running = self.running


ERRORS: dict[str, tuple[str, Any, type[Exception], str]] = {
    "unknown": ("wieght", ROWS, AttributeError, r"Odd has no attribute `wieght`: did you mean 'weight'\?"),
    "unknown below": ("inner.x", ROWS, AttributeError, "Linear has no attribute `x`"),
    "unknown path": ("other.weight", ROWS, AttributeError, "Odd has no attribute `other`"),
    "empty": ("", ROWS, AttributeError, "has no attribute"),
    "not a tensor": ("words", ROWS, ValueError, "Expected Odd.words to be a Tensor, but found str"),
    "none": (
        "inner.bias",
        ROWS,
        ValueError,
        "Expected Linear.bias to be a Tensor, but found NoneType, at 'inner.bias'",
    ),
    "a module": ("inner", ROWS, ValueError, "Expected Odd.inner to be a Tensor, .* such as 'inner.weight'"),
    "not contiguous": ("slanted", ROWS, ValueError, "param: slanted is not a contiguous Tensor"),
    "plain and not contiguous": ("tilted", ROWS, ValueError, "param: tilted is not a contiguous Tensor"),
    "lazy": ("lazy.weight", ROWS, ValueError, "'lazy.weight' has no size yet"),
    "no spec": ("weight", "rows", ValueError, "Expecting ShardingSpec but got"),
    "wrong dim": (
        "weight",
        chunks(2, 0, 1),
        ValueError,
        r"'weight' of size \(4, 6\) cannot be cut .*Invalid sharding dim",
    ),
    "wrong size": ("weight", SPECS["all on one rank"], ValueError, "exceeds tensor dim"),
    "no such rank": ("weight", chunks(0, 0, 9), ValueError, "Global rank 9 does not exist in input process group"),
}


@pytest.mark.parametrize("case", ERRORS)
@ranks(2)
def test_what_cannot_be_sharded_is_an_error(case: str) -> None:
    """Of the kind that callers of the old system expect, on every rank, and nothing changes; also if one rank errs."""
    name, spec, kind, message = ERRORS[case]
    for erring in ([0, 1], [1]):
        module = Odd()
        errs = dist.get_rank() in erring
        with pytest.raises(kind, match=message):
            shard_parameter(module, name if errs else "weight", spec if errs else ROWS)
        assert not any(isinstance(one, ShardedTensor) for one in module.parameters())


@ranks(2)
def test_tensors_that_are_no_parameters() -> None:
    """A buffer stays one, in all places where it hangs, and a plain attribute stays plain."""
    module = Odd()
    names = [name for name, _ in module.named_parameters()]
    for name in ("running", "plain"):
        shard_parameter(module, name, ROWS)
        found = getattr(module, name)
        assert type(found) is ShardedTensor
        assert holds(found, getattr(Odd(), name).detach())
        assert found.requires_grad == (name == "plain")
    assert [name for name, _ in module.named_parameters()] == names
    assert dict(module.named_buffers())["running"] is module.inner.running
    assert "plain" not in module.state_dict()


@ranks(2)
def test_other_tensor_classes_are_refused() -> None:
    """What a subclass means by its data, only it knows."""

    class Marked(torch.Tensor):
        pass

    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(torch.zeros(4).as_subclass(Marked)))
    with pytest.raises(PropertyError, match="'weight' is a Marked: make it a plain parameter"):
        shard_parameter(module, "weight", ROWS)


@ranks(2)
def test_ranks_that_differ_all_raise() -> None:
    """In the spec, the source, the size, the dtype, whether it is frozen, whether it is sharded."""
    rank = dist.get_rank()
    with pytest.raises(ValueError, match="does not match with sharding_spec"):
        shard_parameter(layer(), "weight", chunks(rank, 0, 1))
    with pytest.raises(ValueError, match="does not match with src_rank"):
        shard_parameter(layer(), "weight", ROWS, src_rank=rank)
    sharded = layer()
    if rank:
        sharded.weight = nn.Parameter(torch.zeros(7, 6))
    shard_parameter(sharded, "weight", ROWS)
    for module in (
        nn.Linear(6, 7 + rank),
        nn.Linear(6, 7, dtype=(torch.float32, torch.float64)[rank]),
        layer().requires_grad_(rank == 0),
        (layer(), sharded)[rank],
    ):
        with pytest.raises(RankMismatchError, match="parameter weight property does not match from different ranks"):
            shard_parameter(module, "weight", ROWS)
