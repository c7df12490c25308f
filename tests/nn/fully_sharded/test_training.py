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
from tests.nn.fully_sharded.cases import Block, Model, assert_same, batch_of, made, mine, train, twins, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.errors import PlanError, PlanNameError, RankMismatchError, UnsupportedOpError
from shardwise.nn.fully_sharded import Precision
from shardwise.testing import ranks

FEW = 256  # bytes: what ranks tell each other of a loss is less


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


class Mixing(Block):
    """A layer in which samples meet."""

    def forward(self, x: torch.Tensor) -> Any:
        """With the mean of all samples."""
        return super().forward(x - x.mean(0))


class Counting(Block):
    """A layer that looks at the number of samples."""

    def forward(self, x: torch.Tensor) -> Any:
        """Without a message."""
        return super().forward(x) / x.shape[0]


class Normed(Block):
    """A layer with statistics of all samples, which it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> Any:
        """In training."""
        return super().forward(self.batch_norm(x))


@pytest.mark.parametrize("block", [Mixing, Counting, Normed])
@ranks(3)
def test_units_in_which_samples_meet_are_right_too(block: type[nn.Module]) -> None:
    """They run on sharded tensors."""
    plain, model = twins(lambda: Model(block))
    train(plain, model, (1, 0, 3))
    for unit in made(model).units[1:]:
        assert set(unit.local._known.values()) == {None}
    for one, other in zip(plain.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(whole(other), one, rtol=ROUNDING, atol=ROUNDING)


class Leaving(Block):
    """A layer that leaves a tensor in an attribute."""

    def forward(self, x: torch.Tensor) -> Any:
        """For a loss of the model."""
        self.left = super().forward(x).tanh()
        return x + self.left


class Adding(Model):
    """A model that reads what its layers leave."""

    def forward(self, ids: Any, labels: Any = None) -> Any:
        """With a loss of all layers."""
        return super().forward(ids, labels) + sum(block.left.mean() for block in self.blocks)


@ranks(3)
def test_what_a_unit_leaves_in_attributes_is_of_all_samples() -> None:
    """So it runs on sharded tensors."""
    train(*twins(lambda: Adding(Leaving)), (1, 0, 3))


class Switched(Block):
    """A layer in which samples meet from some step on."""

    meets = False

    def forward(self, x: torch.Tensor) -> Any:
        """By an attribute."""
        return super().forward(x - x.mean(0) if self.meets else x)


@ranks(2)
def test_a_unit_that_changes_is_tried_again() -> None:
    """Its attributes are a part of the kind of call."""
    plain, model = twins(lambda: Model(Switched))
    for meets in (False, True):
        for one in (*plain.modules(), *model.modules()):
            if isinstance(one, Switched):
                one.meets = meets
        train(plain, model, (1, 3))


@ranks(2)
def test_hooks_within_a_unit_see_all_samples() -> None:
    """A unit with such hooks runs on sharded tensors."""
    plain, model = twins()
    train(plain, model, (2, 3), steps=2)
    seen: list[Any] = []
    for one in (plain, model):
        one.get_submodule("blocks.1.up").register_forward_hook(lambda *given: seen.append(whole(given[2])))
    train(plain, model, (2, 3), steps=1)
    torch.testing.assert_close(seen[1], seen[0], rtol=ROUNDING, atol=ROUNDING)


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
def test_gradients_of_gradients_are_refused() -> None:
    """On every rank, in one line."""
    _, model = twins()
    ids, labels = (mine(one, (2, 1)) for one in batch_of(0, (2, 1)))
    with pytest.raises(UnsupportedOpError, match="create_graph"):
        model(ids, labels).backward(create_graph=True)


class Forked(Model):
    """A model that calls a unit several times, one beside another and one behind another."""

    def forward(self, ids: Any, labels: Any = None) -> Any:
        """The first and the last block twice."""
        x = self.table(ids)
        first, middle, last = self.blocks
        x = last(first(x) + first(x.flip(1)) * 0.5)
        scores = self.head(middle(last(x)))
        return scores if labels is None else nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("frozen", [False, True])
@ranks(2)
def test_units_that_are_called_twice(frozen: bool) -> None:
    """Gradients of all calls are added up, and memory is there until the last backward has read it."""

    def make() -> nn.Module:
        model = Forked()
        if frozen:
            for block in model.blocks[:2]:
                block.requires_grad_(False)
        return model

    train(*twins(make), (2, 1))


@ranks(2)
def test_two_forwards_before_the_backwards() -> None:
    """In either order, with an evaluation between; and one backward twice."""
    plain, model = twins()
    batches = [batch_of(step, (2, 1)) for step in range(2)]
    for order in ((0, 1), (1, 0)):
        losses = [plain(*one) for one in batches]
        ours = [model(*(mine(each, (2, 1)) for each in one)) for one in batches]
        with torch.no_grad():
            model(mine(batches[0][0], (2, 1)))
        for number in order:
            for loss in (losses[number], ours[number]):
                loss.backward(retain_graph=True)
        for loss in (losses[0], ours[0]):
            loss.backward()
        assert_same(plain, model)


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


class Dropping(Block):
    """A layer with dropout."""

    def forward(self, x: torch.Tensor) -> Any:
        """In training only."""
        return nn.functional.dropout(super().forward(x), 0.4, self.training)


@ranks(2)
def test_dropout_is_that_of_the_whole_batch() -> None:
    """With all ranks seeded alike."""
    plain, model = twins(lambda: Model(Dropping))
    ids, labels = batch_of(0, (2, 3))
    for _ in range(2):
        torch.manual_seed(5)
        expected = plain(ids, labels)
        torch.manual_seed(5)
        loss = model(mine(ids, (2, 3)), mine(labels, (2, 3)))
        torch.testing.assert_close(whole(loss), expected.detach(), rtol=ROUNDING, atol=0)
        loss.backward()
    model.eval()
    plain.eval()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(whole(model(mine(ids, (2, 3)))), plain(ids), rtol=ROUNDING, atol=ROUNDING)
    assert (0,) in made(model).units[1].local._known.values()


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


class Recomputing(nn.Module):
    """A block whose activations are recomputed, in either of torch's ways."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = Block(), reentrant

    def forward(self, x: torch.Tensor) -> Any:
        """The unit is the block within."""
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("units", [None, "blocks.*.block"])
@pytest.mark.parametrize("reentrant", [False, True])
@ranks(2)
def test_recomputed_activations(reentrant: bool, units: str | None) -> None:
    """Checkpoints around units and within them."""
    plain, model = twins(lambda: Model(lambda: Recomputing(reentrant)), units=units)
    train(plain, model, (2, 1))


@ranks(2)
def test_accumulation() -> None:
    """Of several batches: with a sum for each, and with one sum for all."""
    plain, model = twins()
    samples = (1, 2)
    batches = [batch_of(step, samples) for step in range(3)]
    for ids, labels in batches:
        plain(ids, labels).backward()
    for late in (False, True):
        model.zero_grad()
        for number, (ids, labels) in enumerate(batches):
            loss = model(mine(ids, samples), mine(labels, samples))
            if late and number < 2:
                with made(model).accumulating(), shardwise.trace() as trace:
                    loss.backward()
                assert not [event for event in trace.events if event.kind == "reduce-scatter" and event.sent > FEW]
            else:
                loss.backward()
        assert_same(plain, model)


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
    with pytest.raises(PlanError, match="plain parameters"):
        shardwise.fully_shard(shardwise.fully_shard(Model()))
