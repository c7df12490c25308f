"""Models under `fully_shard` train as their plain twins: any shares, any samples, any alignment."""

from __future__ import annotations

import copy
import gc
import tempfile
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ROUNDING
from tests.nn.fully_sharded.cases import FEW, Block, Model, assert_same, batch_of, made, mine, train, twins, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_

import shardwise
from shardwise.errors import PlanError, PlanNameError, RankMismatchError
from shardwise.nn.fully_sharded import Precision
from shardwise.testing import ranks


@pytest.mark.parametrize("align", ["elements", "rows", "parameters", 5, {"**.up.weight": "parameters", "table.*": 4}])
@pytest.mark.parametrize(("weights", "samples"), [(None, (2, 2, 2)), ([3, 1, 2], (1, 0, 4)), ([1, 0, 1], (0, 3, 1))])
@ranks(3)
def test_shares_of_weights_and_samples(align: Any, weights: Any, samples: tuple[int, ...]) -> None:
    """They are independent of each other; a rank may have no samples, or no weights."""
    plain, model = twins(weights=weights, align=align)
    train(plain, model, samples)
    locals_ = [u.local._known for u in made(model).units[1:]]
    assert all(dims == (0,) for known in locals_ for dims in known.values())


@ranks(1)
def test_one_rank() -> None:
    """Nothing is gathered, and nothing is sent."""
    plain, model = twins()
    train(plain, model, (3,))


@pytest.mark.parametrize(
    "options", [{"keep": True}, {"prefetch": 0}, {"prefetch": 5}, {"units": "blocks.1"}, {"offload": True}]
)
@ranks(2)
def test_when_units_are_gathered_changes_nothing(options: dict[str, Any]) -> None:
    """Neither do the units themselves."""
    plain, model = twins(**options)
    train(plain, model, (2, 1))


@ranks(2)
def test_the_same_as_a_plan() -> None:
    """For `shard_module`."""
    torch.manual_seed(0)
    plain = Model().double()
    model = shardwise.shard_module(copy.deepcopy(plain), shardwise.plans.FullyShard(weights=[2, 1], align="rows"))
    train(plain, model, (2, 1))


@ranks(2)
def test_a_subgroup() -> None:
    """Only the ranks of the group take part."""
    group = dist.new_group([1])
    if dist.get_rank() == 1:
        torch.manual_seed(0)
        plain = Model().double()
        model = shardwise.fully_shard(copy.deepcopy(plain), process_group=group)
        ids, labels = batch_of(0, (2,))
        plain(ids, labels).backward()
        model(*(shardwise.from_local(one, process_group=group) for one in (ids, labels))).backward()
        assert_same(plain, model)


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
@ranks(4)
def test_replicas_of_shards(shape: tuple[int, int]) -> None:
    """On a mesh: replicas along the first axis, shards along the second; replicas have the same bits."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))
    plain, model = twins(mesh=mesh, weights=[3, 1] if shape[1] == 2 else None)
    train(plain, model, (2, 0, 1, 3))
    for parameter in model.parameters():
        assert isinstance(parameter, shardwise.ShardedTensor)
        assert parameter.sharding.has_replicas == (shape[0] > 1)
        mine_ = [shard.tensor.detach().numpy().tobytes() for shard in parameter.local_shards()]
        told: list[Any] = [None] * 4
        dist.all_gather_object(told, mine_)
        rows = [told[k * shape[1] : (k + 1) * shape[1]] for k in range(shape[0])]
        assert all(row == rows[0] for row in rows)


@ranks(2)
def test_collectives_of_a_step() -> None:
    """Each unit is gathered once in the forward and once in the backward, but for the first and the last one."""
    _, model = twins()
    samples = (2, 2)
    for step in range(3):
        ids, labels = (mine(one, samples) for one in batch_of(step, samples))
        with shardwise.trace() as trace:
            loss = model(ids, labels)
        forward = [event.kind for event in trace.events if event.sent > FEW]
        with shardwise.trace() as trace:
            loss.backward()
        backward = [event.kind for event in trace.events if event.sent > FEW]
    assert forward == ["all-gather"] * 4
    assert sorted(backward) == ["all-gather"] * 2 + ["reduce-scatter"] * 4


@ranks(2)
def test_parameters_are_frozen_and_unfrozen() -> None:
    """After the model was sharded, some of a unit and all of one."""
    plain, model = twins()
    names = ["blocks.0.up.weight", *(f"blocks.1.{name}" for name, _ in Block().named_parameters())]
    for wants in (False, True):
        for one in (plain, model):
            one.zero_grad()
            for name in names:
                one.get_parameter(name).requires_grad_(wants)
        train(plain, model, (2, 1), steps=2)


@ranks(2)
def test_models_die_when_they_are_dropped() -> None:
    """With their memory and optimizer."""
    _, model = twins()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(2):
        ids, labels = (mine(one, (2, 1)) for one in batch_of(step, (2, 1)))
        model(ids, labels).backward()
        optimizer.step()
    memories = [weakref.ref(memory) for unit in made(model).units for memory in unit.memories]
    kept = [weakref.ref(model), weakref.ref(optimizer), *memories]
    del model, optimizer, ids, labels
    gc.collect()
    assert [one() for one in kept] == [None] * len(kept)


@ranks(2)
def test_copies_are_refused() -> None:
    """Their hooks would be those of the model."""
    with pytest.raises(PlanError, match="cannot be copied"):
        copy.deepcopy(twins()[1])


@ranks(2)
def test_evaluation_frees_what_it_gathers() -> None:
    """Without gradients, and with gradients that nobody asks for."""
    plain, model = twins()
    ids, _ = batch_of(0, (2, 3))
    for grads in (False, True, False):
        with torch.set_grad_enabled(grads):
            torch.testing.assert_close(
                whole(model(mine(ids, (2, 3)))), plain(ids).detach(), rtol=ROUNDING, atol=ROUNDING
            )
    gathered = [m._is_gathered for u in made(model).units for m in u.memories]
    assert gathered == [False] * len(gathered)
    train(plain, model, (2, 1))


@ranks(2)
def test_frozen_parameters() -> None:
    """Some of a unit, and all of one; they are gathered and get no gradients."""

    def make() -> nn.Module:
        model = Model()
        for parameter in (model.get_parameter("blocks.0.up.weight"), *model.blocks[1].parameters()):
            parameter.requires_grad_(False)
        return model

    plain, model = twins(make)
    train(plain, model, (2, 1))


@ranks(2)
def test_clipping_and_adamw() -> None:
    """The norm is that of all gradients, and the states are cut as the parameters are."""
    plain, model = twins()
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (plain, model)]
    for step in range(3):
        ids, labels = batch_of(step, (2, 3))
        for optimizer in optimizers:
            optimizer.zero_grad()
        plain(ids, labels).backward()
        model(mine(ids, (2, 3)), mine(labels, (2, 3))).backward()
        norms = [clip_grad_norm_(one.parameters(), 0.1) for one in (plain, model)]
        torch.testing.assert_close(whole(norms[1]), norms[0], rtol=ROUNDING, atol=0)
        for optimizer in optimizers:
            optimizer.step()
        assert_same(plain, model, grads=False, tolerance=1e-6)  # Adam divides by small numbers


class Recurrent(Block):
    """A layer that keeps a list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        """Word by word."""
        return super().forward(self.lstm(x)[0])


@ranks(2)
def test_recurrent_layers() -> None:
    """They compute with gathered weights too."""
    plain, model = twins(lambda: Model(Recurrent))
    train(plain, model, (2, 1))


@ranks(2)
def test_a_model_on_meta() -> None:
    """Only the shards have memory; they are initialised as a plain model is, from the same seed."""
    with torch.device("meta"):
        model = Model().double()
    shardwise.fully_shard(model, weights=[2, 1])
    held = sum(memory.shard.numel() for unit in made(model).units for memory in unit.memories)
    assert held < sum(one.numel() for one in model.parameters())
    plain = Model().double()
    for one in (model, plain):
        torch.manual_seed(3)
        for parameter in one.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)
    train(plain, model, (2, 1))


@ranks(2)
def test_parameters_with_other_memory() -> None:
    """As after `to_empty` or `load_state_dict(assign=True)`: the values are those of the parameters."""
    plain, model = twins()
    train(plain, model, (2, 1), steps=1)
    for parameter in model.parameters():
        for shard in parameter.local_shards():
            shard.tensor.data = shard.tensor.detach().clone()
    train(plain, model, (2, 1))


@ranks(2)
def test_hooks_on_parameters() -> None:
    """They get the gradient of all samples."""
    plain, model = twins()
    seen: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda one, name=name: seen.update({name: whole(one.grad)}))
    train(plain, model, (2, 1), steps=1)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(seen[name], parameter.grad, rtol=ROUNDING, atol=ROUNDING)


@ranks(2)
def test_mixed_precision() -> None:
    """Parameters are gathered in bfloat16 and stay in float32; gradients are summed in float32."""
    torch.manual_seed(0)
    plain = Model()
    model = shardwise.fully_shard(copy.deepcopy(plain), precision=Precision(torch.bfloat16, torch.float32))
    ids, labels = batch_of(0, (2, 3))
    twin = copy.deepcopy(plain).to(torch.bfloat16)
    for _ in range(2):
        twin.zero_grad()
        twin(ids, labels).backward()
        model.zero_grad()
        model(mine(ids, (2, 3)), mine(labels, (2, 3))).backward()
        ours = dict(model.named_parameters())
        for name, parameter in twin.named_parameters():
            found = whole(ours[name].grad)
            assert found.dtype == torch.float32
            assert ours[name].dtype == torch.float32
            assert parameter.grad is not None
            scale = parameter.grad.float().abs().max().item() + 1e-3
            torch.testing.assert_close(found / scale, parameter.grad.float() / scale, rtol=0, atol=0.1)  # 8 bits


@ranks(2)
def test_checkpoints_into_any_other_plan() -> None:
    """A state that is saved under one plan is loaded under others, and goes on alike."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    plain, model = twins(weights=[3, 1])
    train(plain, model, (2, 1))
    shardwise.save({"model": model.state_dict()}, f"{names[0]}/saved")
    _, other = twins(align="parameters")
    _, whole_rows = twins()
    rows = shardwise.shard_module(Model().double(), plans_of_rows())
    for target in (other, whole_rows, rows):
        state = {"model": target.state_dict()}
        shardwise.load(state, f"{names[0]}/saved")
        assert_same_values(plain, target)
    train(plain, other, (1, 3))


def plans_of_rows() -> shardwise.ShardingPlan:
    """All tables and matrices by rows."""
    return shardwise.plans.rows(Model().double())


def assert_same_values(plain: nn.Module, model: nn.Module) -> None:
    """Of parameters."""
    ours = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(whole(ours[name]), parameter.detach(), rtol=ROUNDING, atol=ROUNDING)


@ranks(2)
def test_a_failure_in_a_unit_leaves_the_model_as_it_was() -> None:
    """On all ranks; the next step is right."""
    plain, model = twins()
    train(plain, model, (2, 1), steps=1)

    class Failing(Exception):
        pass

    def fail(*_: Any) -> None:
        raise Failing

    handle = model.get_submodule("blocks.1.down").register_forward_hook(fail)
    ids, labels = batch_of(7, (2, 1))
    with pytest.raises(Failing):
        model(mine(ids, (2, 1)), mine(labels, (2, 1)))
    handle.remove()
    assert all(isinstance(one, shardwise.ShardedTensor) for one in model.parameters())
    train(plain, model, (2, 1), steps=2)


@ranks(2)
def test_mistakes() -> None:
    """All ranks raise the same error, and nothing is changed."""
    for options, error, text in (
        ({"units": "block.*"}, PlanNameError, "blocks"),
        ({"align": "row"}, PlanError, "'rows'"),
        ({"prefetch": -1}, PlanError, "prefetch"),
        ({"weights": [1]}, shardwise.ShardwiseError, "weights"),
    ):
        model = Model()
        with pytest.raises(error, match=text):
            shardwise.fully_shard(model, **dict(options))
        assert all(type(one) is nn.Parameter for one in model.parameters())
    with pytest.raises(RankMismatchError):
        shardwise.fully_shard(Model(layers=2 + dist.get_rank()))
    with pytest.raises(PlanError, match="sharded already"):
        shardwise.fully_shard(shardwise.fully_shard(Model()))
