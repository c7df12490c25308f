"""Torch's optimizers step fully sharded parameters over flat memory, and have their states as sharded tensors."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.nn.fully_sharded.cases import assert_same, batch_of, made, mine, twins
from torch import nn
from torch.nn.utils import clip_grad_norm_

import shardwise
from shardwise.nn.fully_sharded import flat_steps
from shardwise.testing import ranks

Make = Callable[[Iterable[Any]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "Adam": lambda given: torch.optim.Adam(given, lr=0.01, amsgrad=True),
    "AdamW": lambda given: torch.optim.AdamW(given, lr=0.01, foreach=True),
    "AdamW, fused": lambda given: torch.optim.AdamW(given, lr=0.01, fused=True),
    "Adamax": lambda given: torch.optim.Adamax(given, lr=0.01),
    "NAdam": lambda given: torch.optim.NAdam(given, lr=0.01),
    "RAdam": lambda given: torch.optim.RAdam(given, lr=0.01),
    "RMSprop": lambda given: torch.optim.RMSprop(given, lr=0.01, momentum=0.5, centered=True),
    "Adagrad": lambda given: torch.optim.Adagrad(given, lr=0.01, initial_accumulator_value=0.1),
    "Adadelta": lambda given: torch.optim.Adadelta(given, lr=0.1),
    "Rprop": lambda given: torch.optim.Rprop(given, lr=0.01),
}
TOLERANCE = 1e-6  # these optimizers divide by small numbers


def backward(models: tuple[nn.Module, nn.Module], step: int) -> None:
    """The gradients of a plain and of a sharded model."""
    ids, labels = batch_of(step, (2, 1))
    models[0](ids, labels).backward()
    models[1](mine(ids, (2, 1)), mine(labels, (2, 1))).backward()


def flat(optimizer: torch.optim.Optimizer) -> Any:
    """What steps for an optimizer."""
    return flat_steps._stepped[optimizer]._inner


@pytest.mark.parametrize("name", OPTIMIZERS)
@ranks(2)
def test_optimizers(name: str) -> None:
    """Each steps as on plain parameters; few tensors are stepped, and the states are sharded as the parameters are."""
    models = twins(weights=[2, 1])
    optimizers = [OPTIMIZERS[name](one.parameters()) for one in models]
    for step in range(3):
        backward(models, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(*models, tolerance=TOLERANCE)
    inner = flat(optimizers[1])
    assert sum(len(group["params"]) for group in inner.param_groups) == len(made(models[1]).units)
    for plain, sharded in zip(models[0].parameters(), models[1].parameters(), strict=True):
        expected, found = optimizers[0].state[plain], optimizers[1].state[sharded]
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            whole = found[key].full_tensor() if isinstance(found[key], shardwise.ShardedTensor) else found[key]
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(whole, value, rtol=TOLERANCE, atol=TOLERANCE)
                assert not value.ndim or isinstance(found[key], shardwise.ShardedTensor)


@ranks(3)
def test_muon() -> None:
    """Matrices that lie whole on one rank are stepped there as plain ones: no op on sharded tensors, no message.

    Muon computes in bfloat16, so the plain twin gets the same gradients to the last bit.
    """
    plain, model = twins(weights=[2, 1, 0], align={"blocks.*.*.weight": "parameters"})
    pairs = [
        (one, theirs)
        for (name, one), theirs in zip(model.named_parameters(), plain.parameters(), strict=True)
        if name.startswith("blocks") and one.ndim == 2
    ]
    rate = 0.1
    optimizers = [torch.optim.Muon([pair[k] for pair in pairs], lr=rate) for k in range(2)]
    for step in range(3):
        ids, labels = batch_of(step, (2, 0, 1))
        model(mine(ids, (2, 0, 1)), mine(labels, (2, 0, 1))).backward()
        for ours, theirs in pairs:
            grad: Any = ours.grad
            theirs.grad = grad.full_tensor()
        with shardwise.trace() as trace:
            optimizers[0].step()
        assert not trace.events
        assert not trace.ops
        optimizers[1].step()
        model.zero_grad()
        for ours, theirs in pairs:
            values: Any = ours.detach()
            torch.testing.assert_close(values.full_tensor(), theirs.detach(), rtol=0, atol=rate * 2**-7)
            state = optimizers[0].state[ours]["momentum_buffer"]
            torch.testing.assert_close(state.full_tensor(), optimizers[1].state[theirs]["momentum_buffer"])
    assert len(flat(optimizers[0]).param_groups[0]["params"]) == len(pairs)


@ranks(2)
def test_groups_and_schedules() -> None:
    """Parameters of a unit in several groups, with rates that change."""
    models = twins()
    optimizers, schedules = [], []
    for one in models:
        decayed = [parameter for parameter in one.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in one.parameters() if parameter.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.2}]
        optimizers.append(torch.optim.SGD(groups, lr=0.1, momentum=0.9))
        schedules.append(torch.optim.lr_scheduler.ExponentialLR(optimizers[-1], 0.5))
    for step in range(3):
        backward(models, step)
        for one, optimizer, schedule in zip(models, optimizers, schedules, strict=True):
            clip_grad_norm_(one.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        assert_same(*models)
    assert [len(group["params"]) for group in optimizers[1].param_groups] == [
        len(group["params"]) for group in optimizers[0].param_groups
    ]


@ranks(2)
def test_states_are_saved_and_loaded() -> None:
    """Into a model of other shares, by torch's state dicts and by checkpoints."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    plain, model = twins(weights=[3, 1])
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (plain, model)]
    for step in range(2):
        backward((plain, model), step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    shardwise.save({"model": model, "optimizer": optimizers[1]}, f"{folder[0]}/saved")
    _, other = twins(weights=[1, 2])
    optimizer = torch.optim.SGD(other.parameters(), lr=0.5, momentum=0.9)
    shardwise.load({"model": other, "optimizer": optimizer}, f"{folder[0]}/saved")
    _, same = twins(weights=[3, 1])
    again = torch.optim.SGD(same.parameters(), lr=0.1, momentum=0.9)
    same.load_state_dict(model.state_dict())
    again.load_state_dict(optimizers[1].state_dict())
    for step in range(2, 4):
        backward((plain, other), step)
        ids, labels = (mine(one, (2, 1)) for one in batch_of(step, (2, 1)))
        same(ids, labels).backward()
        for one in (optimizers[0], optimizer, again):
            one.step()
            one.zero_grad()
        assert_same(plain, other)
        assert_same(plain, same)


@ranks(2)
def test_parameters_without_gradients_stay() -> None:
    """Whole units, and some parameters of one."""
    plain, model = twins()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (plain, model)]
    for step in range(4):
        backward((plain, model), step)
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            if step % 2:
                one.get_parameter("blocks.0.up.weight").grad = None
                for parameter in one.get_submodule("blocks.1").parameters():
                    parameter.grad = None
            optimizer.step()
            optimizer.zero_grad()
        assert_same(plain, model)


@ranks(2)
def test_a_closure() -> None:
    """The gradients come within the step."""
    plain, model = twins()
    for one, feed in ((plain, lambda x: x), (model, lambda x: mine(x, (2, 1)))):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for step in range(2):
            ids, labels = map(feed, batch_of(step, (2, 1)))

            def closure(one: Any = one, optimizer: Any = optimizer, ids: Any = ids, labels: Any = labels) -> Any:
                optimizer.zero_grad()
                loss = one(ids, labels)
                loss.backward()
                return loss

            optimizer.step(closure)
    assert_same(plain, model)


@ranks(2)
def test_a_step_keeps_no_gradients() -> None:
    """When they are dropped, their memory is free: the optimizer that steps on flat memory has none of them."""
    model = shardwise.fully_shard(nn.Sequential(*[nn.Linear(8, 8) for _ in range(2)]))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = shardwise.from_local(torch.ones(2, 8))
    model(batch).sum().backward()
    fully_sharded: Any = model.fully_sharded
    (memory,) = fully_sharded.units[1].memories
    held = weakref.ref(memory.grad.untyped_storage())
    optimizer.step()
    optimizer.zero_grad()
    model(batch)
    assert memory.grad is None
    assert held() is None
