"""`shard_module`: what a plan makes of a module, beside its plain twin."""

from __future__ import annotations

import copy
import io
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, KINDS, SPECS, assert_close, chunks, places
from tests.nn.models import COLUMNS, OPTIMIZERS, ROWS, batches, net, same, train_alike, twins, whole
from torch import nn

import shardwise
from shardwise import ReplicatedShardingSpec, ShardedTensor, ShardingPlan, shard_module
from shardwise.errors import PlanKindError, RankMismatchError
from shardwise.nn.sharding_plan import ShardingPlanner
from shardwise.nn.sharding_plan.plan import Sharder
from shardwise.testing import ranks

# Both optimizers update each element by itself: layouts that differ in what a rank holds get the one with more state.
LAYOUTS = [(layout, "AdamW" if layout in KINDS else "SGD") for layout in ALL]


@pytest.mark.parametrize(("layout", "optimizer"), LAYOUTS)
@ranks(4)
def test_a_sharded_module_trains_as_its_plain_twin(layout: str, optimizer: str) -> None:
    """Any layout for the embedding and two weights, rows for a third, with a plain torch optimizer."""
    model, plain = twins()
    plan = {"embed.weight": ALL[layout], "fc1.weight": ALL[layout], "fc10.weight": ROWS, "head.weight": ALL[layout]}
    assert shard_module(model, ShardingPlan(plan)) is model
    assert isinstance(model.fc1.weight, ShardedTensor)
    assert isinstance(model.fc1.weight, nn.Parameter)
    assert type(model.fc1.bias) is nn.Parameter
    train_alike(model, plain, OPTIMIZERS[optimizer])


@ranks(2)
def test_two_ranks() -> None:
    """Rows and columns, the bias cut too."""
    model, plain = twins()
    plan = {"fc1.*": chunks(0, 0, 1), "fc10.weight": chunks(1, 0, 1), "embed.weight": chunks(0, 1)}
    shard_module(model, ShardingPlan(plan))
    assert isinstance(model.fc1.bias, ShardedTensor)
    train_alike(model, plain, OPTIMIZERS["SGD"])


@ranks(4)
def test_a_sub_group_shards_among_itself() -> None:
    """The ranks 1 and 3 hold the model; the others are not asked."""
    group = dist.new_group([1, 3])
    model, plain = twins()
    if dist.get_rank() in (1, 3):
        shard_module(model, ShardingPlan({"**.weight": ReplicatedShardingSpec(places(1, 3))}), process_group=group)
        same(model, plain)
        again, _ = twins()
        plan = {name: chunks(0, 3, 1) for name in ("embed.weight", "fc1.weight", "head.weight")}
        shard_module(again, ShardingPlan(plan), process_group=group)
        train_alike(again, plain, OPTIMIZERS["SGD"], group)


@ranks(4)
def test_values_come_from_the_source_rank() -> None:
    """Whatever the others have, or have not: they may hold the module on the meta device."""
    for others_have_data in (True, False):
        rank = dist.get_rank()
        with torch.device("cpu" if others_have_data or rank == 2 else "meta"):
            model = net(seed=rank)
        shard_module(model, ShardingPlan({"**.weight": ReplicatedShardingSpec(places(0, 1, 2, 3))}), src_rank=2)
        expected = net(seed=2)
        for name in ("embed.weight", "fc1.weight", "norm.weight"):
            assert torch.equal(whole(model.get_parameter(name)), expected.get_parameter(name).detach())


@ranks(4)
def test_a_plain_parameter_is_free_before_the_next_is_sharded() -> None:
    """And a shard does not keep the memory of the whole."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    alive = [weakref.ref(layer.weight) for layer in model]
    seen: list[list[bool]] = []

    class Watching(type(ROWS)):
        def layout(self, size: Any) -> Any:
            seen.append([one() is not None for one in alive])
            return super().layout(size)

    shard_module(model, ShardingPlan({"*.weight": Watching(0, places(0, 1, 2, 3))}))
    assert [one() for one in alive] == [None, None, None]
    assert seen[-3:] == [[True, True, True], [False, True, True], [False, False, True]]
    for layer in model:
        assert layer.weight.local_tensor().untyped_storage().nbytes() == 2 * 8 * 4


# Ties ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", ["embed.weight", "head.weight", "both", "pattern"])
@ranks(4)
def test_tied_parameters_stay_tied(named: str) -> None:
    """Sharded once, whichever of its names the plan uses, and trained as one."""
    model, plain = twins(tied=True)
    names = {"both": ["embed.weight", "head.weight"], "pattern": ["**.weight"]}.get(named, [named])
    plan = dict.fromkeys(names, ReplicatedShardingSpec(places(0, 1, 2, 3)) if named == "pattern" else ROWS)
    shard_module(model, ShardingPlan({"fc1.weight": ROWS, **plan}))
    assert isinstance(model.embed.weight, ShardedTensor)
    assert model.embed.weight is model.head.weight
    train_alike(model, plain, OPTIMIZERS["AdamW"])
    assert model.double().embed.weight is model.head.weight
    assert copy.deepcopy(model).embed.weight is not model.embed.weight
    twin = copy.deepcopy(model)
    assert twin.embed.weight is twin.head.weight


@ranks(2)
def test_a_module_used_twice_is_one_module() -> None:
    """A layer under two names is sharded, and swapped, in both places."""
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    shard_module(model, ShardingPlan({"2.weight": chunks(0, 0, 1)}))
    assert model[0].weight is model[2].weight
    assert isinstance(shared.weight, ShardedTensor)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    shard_module(model, ShardingPlan({"2": Wrapping()}))
    assert model[0] is model[2]
    assert isinstance(model[0], Wrapped)


# Sharders -----------------------------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """What a sharder makes of a layer: its weight in rows."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        count = dist.get_world_size()
        shardwise.nn.shard_parameter(self.inner, "weight", chunks(0, *range(count)))

    def forward(self, x: torch.Tensor) -> Any:
        """As the module it was made of."""
        return self.inner(x)


class Wrapping(Sharder):
    """Wraps, and counts."""

    def __init__(self) -> None:
        self.called = 0

    def shard(self, module: nn.Module) -> nn.Module:
        """See `Wrapped`."""
        self.called += 1
        return Wrapped(module)


@ranks(4)
def test_a_sharder_swaps_its_submodule() -> None:
    """And one on fc1 does not stand in the way of a spec for fc10."""
    model, plain = twins()
    sharder = Wrapping()
    shard_module(model, ShardingPlan({"fc1": sharder, "fc10.weight": COLUMNS, "head.weight": ROWS}))
    assert isinstance(model.fc1, Wrapped)
    assert dict(model.named_modules())["fc1"] is model.fc1
    assert sharder.called == 1
    assert isinstance(model.fc10.weight, ShardedTensor)
    mine, everyone = batches()
    assert_close(whole(model(mine)), plain(everyone).detach())


@ranks(2)
def test_sharders_by_pattern_and_patterns_around_them() -> None:
    """A sharder for each layer of a list; a pattern for all weights leaves their insides alone."""
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    model = nn.ModuleDict({"layers": layers, "out": nn.Linear(4, 4)})
    sharder, spec = Wrapping(), ReplicatedShardingSpec(places(0, 1))
    shard_module(model, ShardingPlan({"**": spec, "layers.*": sharder}, output_plan={"layers.*": chunks(0, 0, 1)}))
    assert sharder.called == 3
    for layer in layers:
        assert isinstance(layer, Wrapped)
        assert layer.inner.weight.sharding_spec() == chunks(0, 0, 1)
        assert type(layer.inner.bias) is nn.Parameter
        assert len(layer._forward_hooks) == 1
    assert model["out"].weight.sharding_spec() == spec


class Failing(Sharder):
    """Fails on one rank, or gives no module."""

    def __init__(self, gives: Any = None) -> None:
        self.gives = gives

    def shard(self, module: nn.Module) -> nn.Module:
        """Nothing good."""
        if self.gives is None and dist.get_rank() == 1:
            raise OverflowError("too many heads")
        return self.gives or module


@ranks(2)
def test_a_sharder_that_fails_on_one_rank_stops_all() -> None:
    """Before any parameter is sharded or module swapped."""
    model = net()
    plan = {"embed": Failing(nn.Identity()), "fc1": Failing(), "head.weight": chunks(0, 0, 1)}
    with pytest.raises(OverflowError, match="too many heads"):
        shard_module(model, ShardingPlan(plan))
    with pytest.raises(PlanKindError, match=r"Failing\.shard gives a module in the place of 'fc1', found str"):
        shard_module(model, ShardingPlan({**plan, "fc1": Failing("nothing")}))
    assert isinstance(model.embed, nn.Embedding)
    assert type(model.head.weight) is nn.Parameter


# Planners, and the life of a module after it ------------------------------------------------------------------------


class Rows(ShardingPlanner):
    """Every matrix in rows."""

    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """By looking at the sizes."""
        return ShardingPlan({name: ROWS for name, one in module.named_parameters() if one.ndim == 2})


@ranks(4)
def test_a_planner_makes_the_plan() -> None:
    """In its place."""
    model, plain = twins()
    shard_module(model, Rows())
    assert [name for name, one in model.named_parameters() if isinstance(one, ShardedTensor)] == [
        "embed.weight",
        "fc1.weight",
        "fc10.weight",
        "head.weight",
    ]
    train_alike(model, plain, OPTIMIZERS["SGD"])


@ranks(4)
def test_a_sharded_module_is_sharded_again_in_place() -> None:
    """By another plan: parameters are resharded, gradients with them, and an optimizer keeps them."""
    model, plain = twins()
    shard_module(model, ShardingPlan({"embed.weight": ROWS, "fc1.weight": ROWS, "head.weight": ROWS}))
    optimizer, twin = OPTIMIZERS["SGD"](model.parameters()), OPTIMIZERS["SGD"](plain.parameters())
    for one, ids in zip((model, plain), batches(), strict=True):
        one(ids).pow(2).mean().backward()
    weight = model.fc1.weight
    shard_module(
        model, ShardingPlan({"fc1.weight": SPECS["uneven grid"], "embed.weight": COLUMNS, "head.weight": ROWS})
    )
    assert model.fc1.weight is weight
    assert weight.sharding_spec() == SPECS["uneven grid"]
    assert_close(whole(weight.grad), plain.fc1.weight.grad)
    optimizer.step()
    twin.step()
    assert_close(whole(weight), plain.fc1.weight.detach())


@ranks(4)
def test_the_life_of_a_module_after_it() -> None:
    """state_dict, load_state_dict, deepcopy, dtypes, requires_grad_, zero_grad, eval, whole pickles."""
    model, plain = twins(tied=True)
    shard_module(model, ShardingPlan({"fc1.weight": SPECS["chunk on two ranks"], "head.weight": ROWS}, {"": ROWS}))
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    twin = shard_module(net(1), ShardingPlan({"fc1.weight": COLUMNS}))
    twin.load_state_dict(state)
    same(nn.ModuleList([twin.fc1]), nn.ModuleList([plain.fc1]))
    assert isinstance(twin.embed.weight, nn.Parameter)
    copied, converted = copy.deepcopy(model).half(), copy.deepcopy(plain).half()
    assert copied.fc1.weight.dtype == torch.float16
    assert model.fc1.weight.dtype == torch.float64
    for (name, parameter), expected in zip(copied.named_parameters(), converted.parameters(), strict=True):
        assert torch.equal(whole(parameter), expected), name
    same(copied.to(torch.float64), converted.to(torch.float64))
    model.requires_grad_(False)
    assert not model.fc1.weight.requires_grad
    model.requires_grad_(True)
    mine, everyone = batches()
    model(mine).sum().backward()
    assert model.fc1.weight.grad is not None
    model.zero_grad()
    assert model.fc1.weight.grad is None
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.head.weight is loaded.embed.weight
    found = loaded(mine)
    assert found.sharding_spec() == ROWS
    assert_close(whole(found), plain(everyone).detach())


@ranks(2)
def test_ranks_with_different_plans_all_raise() -> None:
    """In specs, names, outputs, sharders, sources; and nothing has changed."""
    rank = dist.get_rank()
    rows, columns = chunks(0, 0, 1), chunks(1, 0, 1)
    differing = {
        "sharding_spec of fc1.weight": ShardingPlan({"fc1.weight": (rows, columns)[rank]}),
        "parameter fc1": ShardingPlan({("fc1.weight", "fc10.weight")[rank]: rows}),
        "output of fc1": ShardingPlan({}, output_plan={"fc1": (rows, columns)[rank]}),
        "return_local_tensor": ShardingPlan({}, return_local_tensor=["fc1", "fc10"][: rank + 1]),
        "Sharder of fc1": ShardingPlan({"fc1": (Wrapping(), Failing())[rank]}),
    }
    for field, plan in differing.items():
        model = net()
        with pytest.raises(RankMismatchError, match=field):
            shard_module(model, plan)
        assert not any(isinstance(one, ShardedTensor) for one in model.parameters())
        assert not model.fc1._forward_hooks
    with pytest.raises(ValueError, match="does not match with src_rank=1"):
        shard_module(net(), ShardingPlan({"fc1.weight": rows}), src_rank=rank)


@ranks(4)
def test_what_stays_plain_is_the_same_on_every_rank() -> None:
    """Parameters and buffers of a module that each rank initialised for itself, whatever their strides and sizes."""
    torch.manual_seed(dist.get_rank())
    model = nn.ModuleDict({"layer": nn.Linear(4, 8), "norm": nn.BatchNorm1d(8), "out": nn.Linear(8, 4)})
    model["norm"].running_mean += torch.rand(8)
    model["out"].weight = nn.Parameter(torch.rand(8, 4).t())
    expected = [whole(one).clone() for one in (*model.parameters(), *model.buffers())]
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, expected)
    shard_module(model, ShardingPlan({"layer.weight": chunks(0, 0, 1, 2, 3)}), src_rank=2)
    for found, given in zip((*model.parameters(), *model.buffers()), everyone[2], strict=True):
        assert torch.equal(whole(found), given)
    with torch.device("meta" if dist.get_rank() else "cpu"):
        some = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    shard_module(some, ShardingPlan({"0.*": chunks(0, 0, 1, 2, 3)}))
    assert some[1].weight.is_meta == (dist.get_rank() > 0)
    with shardwise.settings.own_batches():
        own = nn.Linear(4, 8)
        before = own.bias.detach().clone()
        shard_module(own, ShardingPlan({"weight": chunks(0, 0, 1, 2, 3)}))
        assert torch.equal(own.bias.detach(), before)
