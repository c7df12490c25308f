"""`shardwise.explain`: what a call would move, found out by one rank alone, beside what it then moves."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import chunks
from torch import nn
from torch.nn import functional

import shardwise
from shardwise import GridShardingSpec, plans
from shardwise.testing import ranks

PLACES = [f"rank:{rank}/cpu" for rank in range(3)]


class Small(nn.Module):
    """A norm, two layers with a dropout between them, and a buffer that each call writes into."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8, bias=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        """With a residual."""
        self.calls += 1
        return x + self.down(functional.dropout(self.up(self.norm(x)).relu(), 0.25))


def sharded(seed: int = 0) -> nn.Module:
    """Cut unevenly: one of the three ranks holds nothing of the layers."""
    torch.manual_seed(seed)
    rows, columns = (GridShardingSpec((dim,), PLACES, sizes=[(8, 4, 0)]) for dim in (0, 1))
    plan = shardwise.ShardingPlan({"up.weight": rows, "up.bias": rows, "down.weight": columns})
    return shardwise.shard_module(Small().double(), plan)


def told(trace: Any) -> list[Any]:
    """What must be the same of an explanation and of a trace."""
    return [(one.op, one.place, one.module, one.kind, one.sent, one.received) for one in trace.events]


def state_of(model: nn.Module) -> list[torch.Tensor]:
    """This rank's own values of all that a model has, and whether it has gradients."""
    held = [*model.parameters(), *model.buffers()]
    assert all(one.grad is None for one in held)
    kinds = shardwise.ShardedTensor
    own = [one._local_tensors() if isinstance(one, kinds) else [one] for one in held]
    return [tensor.detach().clone() for tensors in own for tensor in tensors]


@ranks(3)
def test_a_step_moves_what_was_explained_and_explaining_changes_nothing() -> None:
    """Forward, backward and optimizer, in a closure; only one rank asks for an explanation, and no other is asked."""
    model, x = sharded(), torch.ones(6, 8, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    before, drawn = state_of(model), torch.get_rng_state()
    explained = shardwise.explain(step) if dist.get_rank() == 1 else None
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(map(torch.equal, state_of(model), before))
    assert not optimizer.state
    with shardwise.validation(False), shardwise.trace() as t:
        step()
    if explained is not None:
        real = [one for one in t.events if not one.is_meeting]
        assert [row[:4] for row in told(explained)] == [row[:4] for row in told(t) if row[3] != "meeting"]
        assert [(one.sent, one.received, one.in_all) for one in explained.events] == [
            (one.sent, one.received, one.in_all) for one in real
        ]
        assert explained.sent == sum(one.sent for one in real) > 0
        assert explained.in_all >= explained.sent
        assert not explained.stopped
        assert "all ranks send" in str(explained)
    twice = shardwise.explain(step)  # with gradients and a state of the optimizer
    assert [row[:4] for row in told(twice)] == [row[:4] for row in told(t) if row[3] != "meeting"]


@ranks(3)
def test_meetings_are_counted_as_the_step_has_them() -> None:
    """Small sums travel with them; clipping gathers all norms at once, with a plain gradient among them too."""
    model, x = sharded(), torch.ones(6, 8, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    explained = shardwise.explain(step)
    with shardwise.trace() as t:
        step()
    every = sorted([*explained.events, *explained.meetings], key=lambda one: one.number)
    wanted = [(one.op, one.kind, one.sent, one.received) for one in t.events]
    assert [(one.op, one.kind, one.sent, one.received) for one in every] == wanted
    assert len(explained.meetings) == sum(one.is_meeting for one in t.events) > 0
    head = " ".join(str(explained).split("\n\n")[0].split())
    assert f"for these layouts; {len(explained.meetings)} meeting" in head
    assert max(map(len, str(explained).splitlines())) <= 100


TABLE = torch.arange(12.0)  # a name of this module, which a function below uses


def through_a_name(x: Any) -> Any:
    """Writes into a tensor that it was not given."""
    TABLE.add_(1)
    return x.redistribute(chunks(1, 0, 1, 2)).sum() + TABLE.sum()


class Trainer:
    """Holds what it works on, as trainers do."""

    def __init__(self) -> None:
        self.weight = shardwise.ones(chunks(0, 0, 1, 2), 6, 9, requires_grad=True)
        self.steps = [0]

    def step(self, scale: float = 1.0) -> Any:
        """A transfer, forward and backward."""
        loss = (self.weight.redistribute(chunks(1, 0, 1, 2)) * scale).sum()
        loss.backward()
        self.steps.append(1)
        return loss


@ranks(3)
def test_whatever_is_called_is_copied_first() -> None:
    """A method, a partial, a lambda with a closure, names of a module, a module with keywords."""
    trainer, x = Trainer(), shardwise.ones(chunks(0, 0, 1, 2), 6, 9)
    expected = ["redistribute", "backward of redistribute"]
    bound = shardwise.explain(trainer.step, scale=2.0)
    within = shardwise.explain(lambda: trainer.step())
    partial = shardwise.explain(functools.partial(trainer.step, 3.0))
    for one in (bound, within, partial):
        assert [event.op for event in one.events if "redistribute" in event.op] == expected
        assert all(event.in_all == 6 * 9 * 4 * 2 // 3 for event in one.events if "redistribute" in event.op)
    assert trainer.weight.grad is None
    assert trainer.steps == [0]
    before = TABLE.clone()
    named = shardwise.explain(through_a_name, x)
    assert torch.equal(TABLE, before)
    assert named.events[0].op == "redistribute"
    plain = sharded()
    whole = torch.ones(6, 8, dtype=torch.float64)
    assert told(shardwise.explain(plain, whole)) == told(shardwise.explain(plain, x=whole))
    assert "nothing would be sent" in str(shardwise.explain(lambda: x + 1))


@ranks(3)
def test_what_values_decide_is_said() -> None:
    """A loop that asks for a value ends the explanation; a lookup in a table goes on, with bytes that nobody knows."""
    x = shardwise.ones(chunks(0, 0, 1, 2), 6, 9)

    def asks(x: Any) -> Any:
        y = x.redistribute(chunks(1, 0, 1, 2))
        return y if y.sum().item() > 0 else -y

    found = shardwise.explain(asks, x)
    assert found.events[0].op == "redistribute"
    assert "depends on values" in found.stopped
    assert "test_explain.py:" in found.stopped
    assert "in asks" in str(found)
    table = nn.Embedding(12, 4, sparse=True)
    shardwise.shard_module(table, shardwise.ShardingPlan({"weight": chunks(0, 0, 1, 2)}))

    def trains(ids: torch.Tensor) -> None:
        table(ids).redistribute(chunks(2, 0, 1, 2)).sum().backward()

    rows = shardwise.explain(trains, torch.arange(6)[None])
    unknown = [event.op for event in rows.events if not event.known]
    assert unknown == ["embedding", "backward of embedding"]
    assert any(event.op == "redistribute" and event.known for event in rows.events)
    assert "+ ?" in str(rows)
    assert table.weight.grad is None
    table.sparse = False  # then rows of a small batch are added up, whatever the ids are
    rows = shardwise.explain(trains, torch.arange(6)[None])
    assert all(event.known for event in rows.events)
    assert [event.kind for event in rows.events if event.op == "embedding"] == ["reduce-scatter"]
    with pytest.raises(RuntimeError, match="broadcast"):  # what is wrong with a call is raised, as by the call
        shardwise.explain(lambda: x + torch.ones(5, 5))


@ranks(2)
def test_modules_that_send_more_than_their_weights() -> None:
    """The explanation says so, and what gathers weights instead; it is silent where little is sent."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    plan = plans.fully_sharded(model)
    assert "shardwise.fully_shard" in str(plan).splitlines()[-1]
    shardwise.shard_module(model, plan)
    batches = [shardwise.from_local(torch.ones(rows, 16)) for rows in (4, 4096)]
    few, many = (str(shardwise.explain(lambda x=x: model(x).mean().backward())) for x in batches)
    assert "fully_shard" not in few
    assert "2 modules, '2' most of all, send more than it would take to gather the weights" in many
    assert max(map(len, many.splitlines())) <= 100
