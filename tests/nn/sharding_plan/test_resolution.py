"""A plan is looked at as a whole, and all that is wrong with it is told at once, on every rank; nothing is changed."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import boxes, chunks, places
from tests.nn.models import Net, net
from torch import nn

from shardwise import ChunkShardingSpec, ReplicatedShardingSpec, ShardedTensor, ShardingPlan, shard_module
from shardwise.errors import PlanError, ShardwiseError
from shardwise.nn.sharding_plan import resolve_plan
from shardwise.nn.sharding_plan.plan import Sharder
from shardwise.testing import ranks

ROWS, COLUMNS = chunks(0, 0, 1), chunks(1, 0, 1)


class Keeping(Sharder):
    """Changes nothing; two of them are different."""

    def shard(self, module: nn.Module) -> nn.Module:
        """Never called in a plan that is wrong."""
        raise AssertionError("called")


def untouched(model: Net) -> bool:
    """Whether nothing was sharded, swapped or hooked."""
    plain = not any(isinstance(one, ShardedTensor) for one in model.parameters())
    return plain and not any(module._forward_hooks for module in model.modules())


# The plan, the kind of the error, what it says.
SINGLE: dict[str, tuple[ShardingPlan, type[Exception], str]] = {
    "no spec": (
        ShardingPlan({"fc1.weight": "rows"}),
        TypeError,
        "Only `ShardingSpec` and `Sharder` are supported to shard",
    ),
    "no output spec": (
        ShardingPlan({}, {"fc1": Keeping()}),
        TypeError,
        "Only `ShardingSpec` is supported as output_plan",
    ),
    "a sharder of the root": (ShardingPlan({"": Keeping()}), KeyError, "path must not be empty for custom sharder!"),
    "unknown name": (
        ShardingPlan({"fc2.weight": ROWS}),
        AttributeError,
        "Nested has no attribute `fc2`: did you mean 'fc1.weight'",
    ),
    "unknown parameter": (ShardingPlan({"fc1.gain": ROWS}), AttributeError, "Linear has no attribute `gain`"),
    "unknown module": (ShardingPlan({"fc2": Keeping()}), AttributeError, "Nested has no attribute `fc2`"),
    "unknown output": (ShardingPlan({}, {"fc1.x": ROWS}), AttributeError, "Linear has no attribute `x`"),
    "unknown local output": (ShardingPlan({}, None, ["fc2"]), AttributeError, "Nested has no attribute `fc2`"),
    "empty pattern": (ShardingPlan({"layers.*": ROWS}), AttributeError, r"pattern 'layers\.\*' matches nothing"),
    "a slip in a pattern": (
        ShardingPlan({"**.fc1.wieght": ROWS}),
        AttributeError,
        r"no attribute like that; did you mean '\*\*\.fc1\.weight' or",
    ),
    "a layer, not its weight": (ShardingPlan({"**.fc1": ROWS}), ValueError, "did you mean '\\*\\*.fc1.weight'"),
    "empty module pattern": (ShardingPlan({}, {"fc1.**.x": ROWS}), AttributeError, "matches nothing"),
    "module, not parameter": (
        ShardingPlan({"fc1": ROWS}),
        ValueError,
        "Expected Nested.fc1 to be a Tensor, but found Linear",
    ),
    "parameter, not module": (
        ShardingPlan({"fc1.weight": Keeping()}),
        AttributeError,
        "'fc1.weight' should be a module",
    ),
    "no parameter": (
        ShardingPlan({"head.bias": ROWS}),
        ValueError,
        "Expected Linear.bias to be a Tensor, but found NoneType",
    ),
    "a buffer": (
        ShardingPlan({"scale": ROWS}),
        ValueError,
        "Expected Nested.scale to be a Parameter, but found a buffer",
    ),
    "too many dims": (ShardingPlan({"fc1.bias": COLUMNS}), ValueError, "'fc1.bias' of size .* Invalid sharding dim"),
    "wrong size": (
        ShardingPlan({"fc10.weight": boxes(([0, 0], [7, 6], 0))}),
        ValueError,
        "'fc10.weight' .* exceeds tensor dim",
    ),
    "a gap": (ShardingPlan({"fc1.weight": boxes(([0, 0], [7, 5], 0))}), ValueError, "does not match tensor volume"),
    "rank out of the group": (
        ShardingPlan({"fc1.weight": chunks(0, 0, 7)}),
        ValueError,
        "Global rank 7 does not exist",
    ),
    "no rank": (ShardingPlan({"fc1.weight": ChunkShardingSpec(0, ["cpu"])}), ValueError, "names no rank"),
    "in a sharder's tree": (
        ShardingPlan({"fc1": Keeping(), "fc1.weight": ROWS}),
        RuntimeError,
        "should not conflict with the submodule tree",
    ),
    "a sharder in another's tree": (
        ShardingPlan({"inner": Keeping(), "inner.0": Keeping()}),
        RuntimeError,
        "the Sharder on 'inner.0' should not conflict with the submodule tree that the Sharder on 'inner' works on",
    ),
    "an output in a sharder's tree": (
        ShardingPlan({"inner": Keeping()}, {"inner.0": ROWS}),
        RuntimeError,
        "changing the output of 'inner.0' should not conflict with the submodule tree",
    ),
    "two patterns": (
        ShardingPlan({"fc1.*": ROWS, "*.weight": ReplicatedShardingSpec(places(0, 1))}),
        ValueError,
        r"'fc1\.\*' and '\*\.weight' say different things of 'fc1\.weight'",
    ),
    "two outputs": (ShardingPlan({}, {"fc1*": ROWS, "*10": COLUMNS}), ValueError, "say different things of 'fc10'"),
    "plan is no dict": (ShardingPlan(["fc1.weight"]), TypeError, "ShardingPlan.plan is a dict by names, found list"),
    "a name is no string": (ShardingPlan({1: ROWS}), TypeError, "names in ShardingPlan.plan are strings, found 1"),
    "local is a string": (
        ShardingPlan({}, None, "fc1"),
        TypeError,
        "return_local_tensor is a list of module paths, found str",
    ),
    "local is a number": (
        ShardingPlan({}, None, 3),
        TypeError,
        "return_local_tensor is a list of module paths, found int",
    ),
    "no plan": (
        [("fc1.weight", ROWS)],
        TypeError,
        "takes a ShardingPlan, or a ShardingPlanner that makes one, or a dict by names of parameters, found list",
    ),
}


class Nested(Net):
    """With a tree two levels deep."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6))


@pytest.mark.parametrize("case", SINGLE)
@ranks(2)
def test_one_problem_is_an_error_of_its_own_kind(case: str) -> None:
    """That callers of the old system catch, and that is ours."""
    plan, kind, message = SINGLE[case]
    model = Nested()
    with pytest.raises(kind, match=message) as caught:
        shard_module(model, plan)
    assert isinstance(caught.value, ShardwiseError)
    assert untouched(model)


@ranks(2)
def test_all_problems_are_told_together() -> None:
    """In one error, which is of every kind among them, survives pickling, and does not touch the module."""
    plans = [
        plan for case, (plan, _, _) in SINGLE.items() if case in ("unknown name", "too many dims", "no output spec")
    ]
    together = ShardingPlan(
        {**plans[0].plan, **plans[1].plan, **plans[2].plan, "": Keeping(), "fc10": Keeping(), "fc10.weight": ROWS},
        plans[0].output_plan or plans[1].output_plan or plans[2].output_plan,
        ["nothing"],
    )
    model = net()
    with pytest.raises(PlanError) as caught:
        shard_module(model, together)
    error = caught.value
    for kind in (AttributeError, ValueError, TypeError, KeyError, RuntimeError):
        assert isinstance(error, kind)
    assert len(error.problems) == 6
    assert str(error).startswith("6 things are wrong with the sharding plan:\n  - ")
    for problem in error.problems:
        assert f"  - {problem}" in str(error)
    for part in (
        "`fc2`",
        "Invalid sharding dim",
        "as output_plan",
        "must not be empty",
        "should not conflict",
        "`nothing`",
    ):
        assert sum(part in problem for problem in error.problems) == 1, part
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.problems, isinstance(again, KeyError)) == (str(error), error.problems, True)
    assert untouched(model)


@ranks(2)
def test_problems_of_several_of_one_kind() -> None:
    """No more kinds than there are."""
    with pytest.raises(AttributeError) as caught:
        shard_module(net(), ShardingPlan({"x.weight": ROWS, "y.weight": ROWS}))
    assert len(caught.value.problems) == 2
    assert not isinstance(caught.value, KeyError | TypeError | RuntimeError)


@ranks(2)
def test_what_one_rank_finds_every_rank_is_told() -> None:
    """Together with what others find."""
    rank = dist.get_rank()
    model = net()
    with pytest.raises(PlanError) as caught:
        shard_module(model, ShardingPlan({"x": ROWS, **({"y": ROWS} if rank else {"z": Keeping()})}))
    names = [problem.split("'")[1] for problem in caught.value.problems]
    assert names == ["z", "x", "y"]
    assert [problem.partition(" (found on ")[2] for problem in caught.value.problems] == ["rank 0)", "", "rank 1)"]
    if rank:
        model.fc1 = nn.Linear(6, 7, bias=False)
    with pytest.raises(ValueError, match=r"found NoneType, at 'fc1.bias' \(found on rank 1\)"):
        shard_module(model, ShardingPlan({"fc1.bias": ROWS}))
    assert untouched(model)


class Confused(ChunkShardingSpec):
    """A spec of one's own that fails in its own way."""

    def layout(self, size: Any) -> Any:
        """Never."""
        raise ZeroDivisionError("of no use")


@ranks(2)
def test_a_spec_that_fails_is_a_problem_like_others() -> None:
    """Alone, and among others."""
    confused = Confused(0, places(0, 1))
    with pytest.raises(ZeroDivisionError, match=r"'fc1.weight' .* cannot be cut by Confused: of no use"):
        shard_module(net(), ShardingPlan({"fc1.weight": confused}))
    with pytest.raises(ZeroDivisionError, match="2 things are wrong"):
        shard_module(net(), ShardingPlan({"fc1.weight": confused, "x": ROWS}))


# Names and patterns -------------------------------------------------------------------------------------------------


def steps(plan: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Which parameter gets which spec."""
    found = resolve_plan(ShardingPlan(plan), model, dist.group.WORLD)
    assert found.problems == []
    return {step.name: step.spec for step in found.parameters}


@ranks(2)
def test_full_names_hold_before_patterns() -> None:
    """In any order; equal specs from two patterns are no contradiction."""
    whole = ReplicatedShardingSpec(places(0, 1))
    model = net()
    for plan in ({"**": whole, "fc1.weight": ROWS}, {"fc1.weight": ROWS, "**": whole}):
        found = steps(plan, model)
        assert found.pop("fc1.weight") == ROWS
        assert set(found) == {name for name, _ in model.named_parameters()} - {"fc1.weight"}
        assert all(spec == whole for spec in found.values())
    assert steps({"fc1.*": ROWS, "fc?.weight": chunks(0, 0, 1)}, model) == {"fc1.weight": ROWS, "fc1.bias": ROWS}
    odd = nn.ModuleDict({"a[0]": nn.Linear(2, 2), "a0": nn.Linear(2, 2)})
    assert set(steps({"a[0].weight": ROWS}, odd)) == {"a[0].weight"}


@ranks(2)
def test_tied_parameters_are_one_thing() -> None:
    """Any name stands for it; contradictions between its names are an error; a full name beats a pattern of another."""
    tied = net(tied=True)
    assert list(steps({"head.weight": ROWS, "embed.weight": ROWS}, tied)) == ["head.weight"]
    assert steps({"head.weight": ROWS, "embed.*": COLUMNS}, tied) == {"head.weight": ROWS}
    with pytest.raises(ValueError, match=r"say different things of 'head.weight', which is the same as 'embed.weight'"):
        shard_module(tied, ShardingPlan({"head.weight": ROWS, "embed.weight": COLUMNS}))
    with pytest.raises(RuntimeError, match=r"the same as 'embed.weight', should not conflict with the submodule tree"):
        shard_module(tied, ShardingPlan({"embed": Keeping(), "head.weight": ROWS}))
    assert untouched(tied)


@ranks(2)
def test_a_sharder_on_fc1_does_not_block_fc10() -> None:
    """Trees are compared as trees, not as letters."""
    found = resolve_plan(ShardingPlan({"fc1": Keeping(), "fc10.weight": ROWS}), net(), dist.group.WORLD)
    assert found.problems == []
    assert [step.path for step in found.sharders] == ["fc1"]
    assert [step.name for step in found.parameters] == ["fc10.weight"]


@ranks(2)
def test_looking_at_a_plan_makes_nothing() -> None:
    """Not even for a table that fits on no machine."""
    table = nn.Embedding(2**40, 64, device="meta")
    found = resolve_plan(ShardingPlan({"weight": ROWS}), table, dist.group.WORLD)
    assert found.parameters[0].layout.size == torch.Size([2**40, 64])


@ranks(2)
def test_ranks_may_write_the_same_plan_in_another_order() -> None:
    """The order of a dict says nothing: parameters are sharded in the order of the module."""
    plan = {"head.weight": ROWS, "embed.weight": COLUMNS, "fc*.weight": ROWS}
    model = net()
    assert list(steps(plan, model)) == ["embed.weight", "fc1.weight", "fc10.weight", "head.weight"]
    entries = list(plan.items())
    shard_module(model, ShardingPlan(dict(entries if dist.get_rank() else reversed(entries))))
    assert model.embed.weight.sharding_spec() == COLUMNS
