"""State by name: saved from one layout and world, loaded into another, and training goes on as if never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, ROUNDING, assert_close, chunks, places
from tests.nn.optim.models import assert_same, batches, model, named, sharded, train, whole
from tests.nn.optim.test_training import FUSED, OPTIMIZERS, make

from shardwise import ReplicatedShardingSpec, ShardedOptimizer, ShardedTensor, ShardingSpec, errors
from shardwise.layout.specs import FixedShardingSpec
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks, run_on_ranks


def gathered(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The same state dict with plain tensors."""
    entries = {name: {key: whole(value) for key, value in entry.items()} for name, entry in state_dict["state"].items()}
    return {**state_dict, "state": entries}


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind not in FUSED])
@ranks(4)
def test_state_moves_to_another_layout_and_training_goes_on(kind: str) -> None:
    """Two steps over uneven shards, several on a rank, a rank without any, and plain parameters; the state loaded into
    another layout, two more: as four on the plain twin."""
    plain = model()
    first = sharded(plain, ALL["uneven, several per rank"], chunks(0, 0, 1, 2))
    before = make(kind, named(first), ShardedOptimizer)
    theirs = make(kind, plain.parameters())
    data = batches(4)
    assert train(first, before, data[:2]) == pytest.approx(train(plain, theirs, data[:2]), rel=ROUNDING)
    assert_same(first, plain)
    second = sharded(plain, ALL["uneven grid"], chunks(1, 3, 1))
    after = make(kind, named(second), ShardedOptimizer)
    after.load_state_dict(before.state_dict())
    assert train(second, after, data[2:]) == pytest.approx(train(plain, theirs, data[2:]), rel=ROUNDING)
    assert_same(second, plain)


@pytest.mark.parametrize("kind", ["AdamW amsgrad", "Adafactor"])
@ranks(4)
def test_every_rank_shows_the_same_names_keys_and_sizes(kind: str) -> None:
    """State of a parameter's size is sharded as it is, also on a rank without shards; counters are there once."""
    plain = model()
    twin = sharded(plain, ALL["all on one rank"], chunks(0, 0, 1, 2))
    ours, theirs = make(kind, named(twin), ShardedOptimizer), make(kind, plain.named_parameters())
    train(twin, ours, batches(2))
    train(plain, theirs, batches(2))
    found, expected = ours.state_dict(), theirs.state_dict()
    assert found["param_groups"][0]["params"] == expected["param_groups"][0]["param_names"]
    for number, name in enumerate(expected["param_groups"][0]["param_names"]):
        entry = found["state"][name]
        assert entry.keys() == expected["state"][number].keys()
        for key, value in entry.items():
            assert_close(whole(value).double(), expected["state"][number][key].double(), f"{key} of {name}")
            if isinstance(twin.get_parameter(name), ShardedTensor) and value.ndim:
                assert isinstance(value, ShardedTensor)
                if value.shape == twin.get_parameter(name).shape:
                    assert value._layout == twin.get_parameter(name)._layout


@ranks(4)
def test_state_of_another_size_is_cut_as_its_parameter() -> None:
    """Of factored moments, rows follow the cut of rows; where flat boxes would overlap, one rank has all of it."""
    specs = {"0.weight": ALL["grid"], "2.weight": ALL["uneven, several per rank"]}
    torch.manual_seed(0)
    named_params = {name: shard_tensor(torch.randn(7, 6), spec).requires_grad_() for name, spec in specs.items()}
    optimizer = ShardedOptimizer(named_params, torch.optim.Adafactor)
    sum(parameter.pow(2).sum() for parameter in named_params.values()).backward()
    optimizer.step()
    state = optimizer.state_dict()["state"]
    rows = state["0.weight"]["row_var"]
    assert rows.shape == (7, 1)
    assert sorted(map(tuple, rows._layout.boxes.sizes.tolist())) == [(3, 1), (3, 1), (4, 1), (4, 1)]
    assert len(state["2.weight"]["row_var"]._layout) == 5
    assert len(state["2.weight"]["col_var"]._layout) == 1


def save(kind: str, path: str) -> None:
    """Train two steps on these ranks, and write the whole state and model from one of them."""
    size = dist.get_world_size()
    twin = sharded(model(), chunks(0, *range(size)), chunks(1, *reversed(range(size))))
    optimizer = make(kind, named(twin), ShardedOptimizer)
    train(twin, optimizer, batches(4)[:2])
    state = gathered(optimizer.state_dict())
    parameters = {name: whole(parameter).detach() for name, parameter in named(twin).items()}
    if dist.get_rank() == 0:
        torch.save((state, parameters), path)
    dist.barrier()


def resume(kind: str, path: str) -> None:
    """Read them on other ranks, in another layout, train two more, and compare with four steps on a plain twin."""
    state, parameters = torch.load(path)
    plain, read = model(), model()
    read.load_state_dict(parameters)
    size = dist.get_world_size()
    twin = sharded(read, chunks(1, *range(size)), chunks(0, *range(size), 0))
    optimizer = make(kind, named(twin), ShardedOptimizer)
    optimizer.load_state_dict(state)
    data = batches(4)
    train(plain, make(kind, plain.parameters()), data)
    train(twin, optimizer, data[2:])
    assert_same(twin, plain)


@pytest.mark.parametrize(
    ("kind", "here", "there"),
    [("SGD momentum", 4, 2), ("Adagrad", 2, 3)]
    + [(kind, *worlds) for kind in ("AdamW amsgrad", "Adafactor") for worlds in ((4, 2), (2, 3), (1, 4))],
)
def test_state_moves_to_another_world(kind: str, here: int, there: int, tmp_path: Path) -> None:
    """Saved whole on so many ranks, loaded on so many others: as if never stopped."""
    path = str(tmp_path / "state")
    run_on_ranks(here, save, kind, path)
    run_on_ranks(there, resume, kind, path)


@ranks(2)
def test_a_named_state_dict_of_torch_can_be_loaded() -> None:
    """Of an optimizer that was made with named parameters, on the plain twin."""
    plain = model()
    twin = sharded(plain, chunks(0, 0, 1), chunks(1, 1, 0))
    theirs = make("AdamW amsgrad", plain.named_parameters())
    train(plain, theirs, batches(2))
    twin.load_state_dict(sharded(plain, chunks(0, 0, 1), chunks(1, 1, 0)).state_dict())
    ours = make("AdamW amsgrad", named(twin), ShardedOptimizer)
    ours.load_state_dict(theirs.state_dict())
    train(twin, ours, batches(2, seed=3))
    train(plain, theirs, batches(2, seed=3))
    assert_same(twin, plain)


@pytest.mark.parametrize("kind", ["SGD momentum", "NAdam", "ASGD", "Adafactor", "AdamW fused"])
@ranks(2)
def test_initial_state_changes_nothing(kind: str) -> None:
    """After init_state every entry is there, nothing else has changed, and training begins as without it."""
    twins = [sharded(model(), chunks(0, 0, 1), chunks(1, 1, 0, 1)) for _ in range(2)]
    fresh, ready = (make(kind, named(twin), ShardedOptimizer) for twin in twins)
    assert not fresh.state
    ready.init_state()
    state = ready.state_dict()["state"]
    assert all(state.values())
    assert all(float(entry["step"]) == 0 for entry in state.values() if "step" in entry)
    data = batches(3)
    assert train(twins[0], fresh, data) == pytest.approx(train(twins[1], ready, data), rel=ROUNDING)
    assert fresh.state_dict()["state"]["0.weight"].keys() == state["0.weight"].keys()


@ranks(2)
def test_a_checkpoint_can_be_read_into_the_initial_state() -> None:
    """What is written in place into the tensors of `state_dict()` is what the next step begins from."""
    twins = [sharded(model(), chunks(0, 0, 1), chunks(1, 1, 0)) for _ in range(2)]
    old, new = (make("SGD momentum", named(twin), ShardedOptimizer) for twin in twins)
    data = batches(4)
    train(twins[0], old, data[:2])
    twins[1].load_state_dict(twins[0].state_dict())
    new.init_state()
    saved, place = old.state_dict()["state"], new.state_dict()["state"]
    with torch.no_grad():
        for name, entry in place.items():
            entry["momentum_buffer"].copy_(saved[name]["momentum_buffer"])
    assert train(twins[0], old, data[2:]) == train(twins[1], new, data[2:])


def trained(second: ShardingSpec | None = None) -> tuple[Any, Any]:
    """A model and its optimizer after a step."""
    twin = sharded(model(), chunks(0, 0, 1), second or chunks(1, 1, 0))
    optimizer = ShardedOptimizer(named(twin), torch.optim.AdamW)
    train(twin, optimizer, batches(1))
    return twin, optimizer


@ranks(2)
def test_all_that_is_wrong_is_told_at_once_and_nothing_changes() -> None:
    """Unknown, missing and mis-shaped entries, on one rank only: every rank raises the same error."""
    _, optimizer = trained()
    before = gathered(optimizer.state_dict())
    bad = gathered(optimizer.state_dict())
    if dist.get_rank() == 1:
        del bad["state"]["2.weight"]
        bad["state"]["3.weight.old"] = {}
        bad["state"]["0.bias"]["exp_avg"] = torch.zeros(3)
        bad["state"]["0.weight"]["exp_avg"] = 5
        bad["state"]["2.bias"]["colour"] = torch.zeros(6)
        del bad["state"]["3.bias"]["exp_avg_sq"]
    bad["param_groups"][0]["lr"] = 7
    with pytest.raises(errors.OptimizerStateError) as raised:
        optimizer.load_state_dict(bad)
    for part in (
        "unknown parameter '3.weight.old'",
        "missing parameter '2.weight': it has no entry in state",
        "mis-shaped state 'exp_avg' of '0.bias': size (3,), should be (7,)",
        "state 'exp_avg' of '0.weight' should be a tensor of size (7, 6), found 5",
        "unknown state 'colour' of '2.bias'",
        "missing state 'exp_avg_sq' of '3.bias'",
        "found on rank 1",
    ):
        assert part in str(raised.value)
    after = gathered(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == 1e-3
    for name, entry in before["state"].items():
        assert all(torch.equal(after["state"][name][key], value) for key, value in entry.items())


@ranks(2)
def test_state_that_is_no_state_dict_is_refused() -> None:
    """With words that say what it should be."""
    _, optimizer = trained()
    with pytest.raises(errors.OptimizerStateError, match="'state' and 'param_groups'"):
        optimizer.load_state_dict({"0.weight": {}})
    numbers = torch.optim.SGD([torch.zeros(2, requires_grad=True)], 0.1).state_dict()
    with pytest.raises(errors.OptimizerStateError, match="numbers and no names"):
        optimizer.load_state_dict(numbers)


@ranks(2)
def test_options_are_loaded_by_the_names_in_their_groups() -> None:
    """Groups in another order or of other sizes find theirs; one of mixed origin is an error."""
    twin = sharded(model(), chunks(0, 0, 1), chunks(1, 1, 0))
    biases, weights = named(twin, lambda n: "bias" in n), named(twin, lambda n: "weight" in n)
    saved = ShardedOptimizer([{"params": weights, "lr": 0.5}, {"params": biases}], torch.optim.SGD, lr=0.1).state_dict()
    some = {"0.bias": biases.pop("0.bias")}
    other = ShardedOptimizer([{"params": biases}, {"params": some}, {"params": weights}], torch.optim.SGD, lr=9)
    other.load_state_dict(saved)
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.1, 0.5]
    mixed = ShardedOptimizer(named(twin), torch.optim.SGD, lr=9)
    with pytest.raises(errors.OptimizerStateError, match="groups of different options"):
        mixed.load_state_dict(saved)
    assert mixed.param_groups[0]["lr"] == 9


@pytest.mark.parametrize("kind", ["AdamW amsgrad", "Adafactor"])
@ranks(4)
def test_a_resharded_parameter_takes_its_state_along(kind: str) -> None:
    """Between two steps, to other boxes on other ranks; and whoever was given new local tensors keeps his."""
    plain = model()
    twin = sharded(plain, ALL["chunk on two ranks"], chunks(0, 0, 1, 2))
    ours, theirs = make(kind, named(twin), ShardedOptimizer), make(kind, plain.parameters())
    data = batches(4)
    train(twin, ours, data[:2])
    twin[0].weight.reshard(ALL["uneven, several per rank"])
    twin[2].bias.reshard(chunks(0, 2, 3))
    for shard in twin[2].weight.local_shards():
        shard.tensor = shard.tensor.detach().clone().requires_grad_()
    train(twin, ours, data[2:])
    train(plain, theirs, data)
    assert_same(twin, plain)
    assert ours.state_dict()["state"]["2.bias"]["step"] == 4


@ranks(4)
def test_state_from_a_sub_group_reaches_the_whole_group() -> None:
    """The old parameters lie on two of four ranks and in their group, the new ones on all."""
    group = dist.new_group([1, 3])
    torch.manual_seed(0)
    plain = torch.randn(7, 6, dtype=torch.float64)
    old = shard_tensor(plain, chunks(0, 1, 3), process_group=group).requires_grad_()
    state = None
    optimizer = ShardedOptimizer({"w": old}, torch.optim.SGD, lr=0.1, momentum=0.9)
    if dist.get_rank() in (1, 3):
        old.grad = torch.ones_like(old)
        optimizer.step()
    state = optimizer.state_dict()
    if dist.get_rank() not in (1, 3):
        like = shard_tensor(plain, chunks(0, 1, 3), process_group=group)
        state["state"]["w"] = {"momentum_buffer": like}
    new = shard_tensor(plain, chunks(1, 0, 1, 2, 3)).requires_grad_()
    other = ShardedOptimizer({"w": new}, torch.optim.SGD, lr=0.1, momentum=0.9)
    other.load_state_dict(state)
    assert torch.equal(other.state_dict()["state"]["w"]["momentum_buffer"].full_tensor(), torch.ones_like(plain))


@ranks(2)
def test_the_state_of_a_parameter_can_be_seen() -> None:
    """`optimizer.state[parameter]`, over the same memory, in the parameter's layout."""
    twin, optimizer = trained()
    seen = optimizer.state[twin[0].weight]
    assert isinstance(seen["exp_avg"], ShardedTensor)
    assert seen["exp_avg"].shape == (7, 6)
    assert len(optimizer.state) == len(list(twin.parameters()))
    assert {id(p) for p in optimizer.state} == {id(p) for p in twin.parameters()}
    with pytest.raises(KeyError, match="no parameter of this optimizer"):
        optimizer.state[torch.zeros(2)]


def test_specs_for_factored_state_are_those_of_the_boxes() -> None:
    """A projection is a layout of its own: every element held, nothing twice on a rank."""
    from shardwise.nn.optim.state import project

    layout = ALL["grid"].layout((7, 6))
    flat = project(layout, torch.Size((1, 6)))
    assert flat is not None
    assert FixedShardingSpec.of(flat).layout((1, 6)).has_replicas
    assert project(layout, torch.Size((2, 6))) is None
    assert project(ReplicatedShardingSpec(places(0, 1)).layout((7, 6)), torch.Size((7, 1))) is not None
