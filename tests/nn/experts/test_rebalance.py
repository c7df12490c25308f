"""Other ranks for experts between steps: which, what travels, and that training goes on as if nothing had happened."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models.twins import whole
from tests.nn.experts.cases import Mixture, mixture
from tests.nn.experts.test_layer import PLACEMENTS, batch, own, twin_of

import shardwise
from shardwise import plans
from shardwise.errors import PlanError, RankMismatchError
from shardwise.nn.experts.balance import balanced, imbalance
from shardwise.testing import ranks

COUNTS = [60, 5, 5, 30, 1, 2, 3]


def stepped(model: Mixture, optimizer: Any, x: Any) -> None:
    """One step."""
    optimizer.zero_grad()
    (model(x) ** 2).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("kind", ["AdamW", "ShardedOptimizer"])
@ranks(4)
def test_training_goes_on(kind: str) -> None:
    """Parameters and states of the optimizer move together; the next steps are those of the plain twin."""
    plain, x = mixture(), batch()
    twin = twin_of(plain, placement=PLACEMENTS["in order"], rest=plans.FullyShard() if kind == "AdamW" else None)
    expected = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    optimizer: Any
    if kind == "AdamW":
        optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    else:
        optimizer = shardwise.ShardedOptimizer(dict(twin.named_parameters()), torch.optim.AdamW, lr=1e-2)
    for room in (None, [3, 3, 2, 2], [0, 5, 1, 1]):
        stepped(plain, expected, x)
        stepped(twin, optimizer, own(x))
        (found,) = shardwise.rebalance(twin, COUNTS, room=room, optimizer=optimizer)
        held = [sum(rank in where for where in found.after) for rank in range(4)]
        assert all(one <= most for one, most in zip(held, room or [2, 2, 2, 1], strict=True))
    stepped(plain, expected, x)
    stepped(twin, optimizer, own(x))
    for one, other in zip(plain.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(whole(other), one.detach(), rtol=1e-9, atol=1e-9)


class Factored(torch.optim.Optimizer):
    """Keeps sums over one dim of squared gradients, and, if asked, one over all experts."""

    def __init__(self, parameters: Any, over_experts: bool = False) -> None:
        super().__init__(parameters, {"over_experts": over_experts})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Scaled by the square root of the sum."""
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                squares = (one.grad**2).sum(-1, keepdim=True)
                state["steps"] = state.get("steps", 0) + 1
                state["sum"] = state["sum"] + squares if "sum" in state else squares
                if group["over_experts"]:
                    state["all"] = (one.grad**2).sum(0)
                one -= 0.01 * one.grad / (state["sum"].sqrt() + 1)


@ranks(4)
def test_states_of_other_shapes() -> None:
    """Those with the experts along their first dim move; for others every rank raises before anything moves."""
    plain, x = mixture(), batch()
    twin = twin_of(plain, placement=PLACEMENTS["in order"])
    expected, optimizer = (Factored(model.experts.parameters()) for model in (plain, twin))
    for room in (None, [3, 3, 2, 2], [0, 5, 1, 1]):
        stepped(plain, expected, x)
        stepped(twin, optimizer, own(x))
        assert optimizer.state[twin.experts.up]["sum"].shape == (7, 6, 1)
        (found,) = shardwise.rebalance(twin, COUNTS, room=room, optimizer=optimizer)
        assert found.moved > 0
        for one in twin.experts.parameters():
            held = optimizer.state[one]["sum"].sharding.elements_by_rank()
            ranks_of_all = {rank for where in found.after for rank in where}
            assert {rank for rank, number in held.items() if number} == ranks_of_all
    for one, other in zip(plain.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(whole(other), one.detach(), rtol=1e-9, atol=1e-9)
    wrong = Factored(twin.experts.parameters(), over_experts=True)
    stepped(twin, wrong, own(x))
    wrong.state[twin.experts.up]["all"] = shardwise.shard(torch.ones(6, 5, dtype=torch.float64), 0)
    before = twin.experts.up.sharding
    with pytest.raises(PlanError, match="the state 'all' of 'up' in 'experts' cannot move"):
        shardwise.rebalance(twin, COUNTS[::-1], room=[3, 3, 2, 2], optimizer=wrong)
    assert twin.experts.up.sharding == before


@ranks(4)
def test_only_what_changes_travels() -> None:
    """Experts that come to another rank, and no others; the rest of their boxes is not sent."""
    twin = twin_of(mixture(), placement=PLACEMENTS["in order"])
    with shardwise.trace() as trace:
        (found,) = shardwise.rebalance(twin, COUNTS)
    assert found.before == tuple((rank,) for rank in PLACEMENTS["in order"])
    arrived = sum(dist.get_rank() in set(new) - set(old) for old, new in zip(found.before, found.after, strict=True))
    assert found.moved > 0
    size = sum(one[0].numel() for one in mixture().experts.parameters()) * 8
    assert sum(event.received for event in trace.events if not event.is_meeting) == arrived * size
    assert str(found) == f"experts: imbalance 2.45 → 2.30, {found.moved} experts move"


@ranks(2)
def test_counts_of_the_layers() -> None:
    """Without counts, those of all ranks since the last time; a proposal changes nothing."""
    plain = mixture(choices=1)
    with torch.no_grad():
        plain.router.weight.zero_()
        plain.router.bias.copy_(torch.tensor([5.0, 0, 0, 4, 0, 0, 0]))
    twin = twin_of(plain, placement=[0, 0, 0, 0, 1, 1, 1])
    with torch.no_grad():
        twin(own(batch(), [3, 20]))
        plain.router.bias[3] = 6
        twin.router.bias[3] = 6
        twin(own(batch(), [23, 0]))
    (found,) = shardwise.rebalance(twin, apply=False)
    assert (found.imbalance_before, found.imbalance_after) == (2.0, 1.0)
    assert len({found.after[0], found.after[3]}) == 2
    assert twin.experts.up.sharding.elements_by_rank()[0] == 4 * 30
    (applied,) = shardwise.rebalance(twin)
    assert applied == found
    (again,) = shardwise.rebalance(twin)
    assert (again.imbalance_before, again.moved) == (1.0, 0)


@ranks(2)
def test_what_cannot_be() -> None:
    """An error on every rank, and nothing has moved."""
    twin = twin_of(mixture())
    cases: list[tuple[dict[str, Any], str]] = [
        ({"counts": [1, 2]}, "give a number of tokens for each"),
        ({"counts": [1, 2, 3, 4, 5, 6, -1]}, "give a number of tokens for each"),
        ({"counts": {"other": COUNTS}}, "0 of the counts"),
        ({"counts": COUNTS, "room": [3, 3]}, "7 in all or more"),
    ]
    for options, message in cases:
        with pytest.raises(PlanError, match=message):
            shardwise.rebalance(twin, **options)
    with pytest.raises(PlanError, match="no experts on ranks"):
        shardwise.rebalance(torch.nn.Linear(2, 2))
    with pytest.raises(RankMismatchError, match="counts"):
        shardwise.rebalance(twin, [dist.get_rank() + 1.0] * 7)
    assert twin.experts.up.sharding.elements_by_rank() == {0: 4 * 30, 1: 3 * 30}


def test_placements() -> None:
    """Room is never exceeded, no expert is lost, copies lie apart, and even work stays as it is."""
    holders = tuple((expert // 4,) for expert in range(16))
    generator = torch.Generator().manual_seed(0)
    for number in range(40):
        counts = (torch.rand(16, generator=generator) ** 4 * 1000).tolist()
        room = {0: 4 + number % 3, 1: 4, 2: 5, 3: 4}
        shares = {0: 1.0, 1: 1.0, 2: 2.0 if number % 2 else 1.0, 3: 1.0}
        found = balanced(holders, counts, room, shares)
        assert all(where and len(set(where)) == len(where) for where in found)
        assert all(sum(rank in where for where in found) <= number for rank, number in room.items())
        now, then = (imbalance(one, counts, [0, 1, 2, 3], list(shares.values())) for one in (holders, found))
        assert then <= now
    assert balanced(holders, [1.0] * 16, dict.fromkeys(range(4), 4), dict.fromkeys(range(4), 1.0)) == holders
    hot = balanced(holders, [100.0] + [1.0] * 15, dict.fromkeys(range(4), 5), dict.fromkeys(range(4), 1.0))
    assert len(hot[0]) == 4
    wide = balanced(((0,), (0,), (0,), (1,)), [5.0, 4.0, 1.0, 1.0], {0: 8, 1: 1}, {0: 1.0, 1: 1.0})
    assert imbalance(wide, [5.0, 4.0, 1.0, 1.0], [0, 1], [1.0, 1.0]) < 1.7  # of 1.82 before: room for twice all experts
