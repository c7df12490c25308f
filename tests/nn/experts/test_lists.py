"""Experts that are modules of a list: every way to call them, every placement, and what cannot be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ROUNDING, places
from tests.models.twins import assert_same_gradients, whole
from tests.nn.experts.lists import BLOCKS, HitBlock, ListBlock, ListModel, list_model
from tests.nn.experts.test_layer import PLACEMENTS, assert_alike, batch, own
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import GridShardingSpec, plans
from shardwise.errors import PlanError, PropertyError
from shardwise.nn.experts.layer import experts_forward
from shardwise.testing import ranks

RESTS: dict[str, Any] = {"plain": None, "fully sharded": plans.FullyShard()}


def twin_of(plain: Any, **options: Any) -> Any:
    """A copy with experts on ranks."""
    model = copy.deepcopy(plain)
    return shardwise.shard_module(model, plans.expert_parallel(model, **options))


@pytest.mark.parametrize("name", BLOCKS)
@ranks(4)
def test_placements(name: str) -> None:
    """Results and gradients are those of the plain twin, whatever the block calls, and wherever experts lie."""
    plain = list_model(name)
    for placement in PLACEMENTS.values():
        twin = twin_of(plain, placement=placement)
        for number, expert in enumerate(twin.block.experts):
            where = placement[number]
            held = (where,) if isinstance(where, int) else tuple(where)
            assert (dist.get_rank() in held) == bool(expert.up.weight.local_shards())
        for _ in range(2):
            assert_alike(twin, plain, own(batch()), batch())


@pytest.mark.parametrize("rest", RESTS)
@ranks(4)
def test_training(rest: str) -> None:
    """Steps of AdamW beside the plain twin; samples of two dims, of which rank 1 has none."""
    plain = list_model("mask")
    twin = twin_of(plain, placement=PLACEMENTS["copies"], rest=RESTS[rest])
    x = torch.randn(7, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (plain, twin)]
    for _ in range(3):
        for model, optimizer, given in zip((plain, twin), optimizers, (x, own(x, [2, 0, 4, 1])), strict=True):
            optimizer.zero_grad()
            (model(given) ** 2).sum().backward()
            optimizer.step()
    for one, other in zip(plain.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(whole(other), one.detach(), rtol=1e-9, atol=1e-9)


@ranks(4)
def test_samples_in_any_layout() -> None:
    """Several boxes on a rank, cut through tokens, and plain ones; the result lies as the samples do."""
    plain, x = list_model("hit"), batch()
    twin = twin_of(plain, placement=PLACEMENTS["copies"])
    several = GridShardingSpec((0,), places(2, 0, 2, 3, 0), sizes=[[4, 6, 2, 10, 1]])
    through = GridShardingSpec((0, 1), [places(0, 1), places(2, 3)])
    for spec in (several, through):
        given = shardwise.shard(x, spec)
        assert_alike(twin, plain, given, x)
        assert twin.block(given).sharding == given.sharding
    found = assert_alike(twin, plain, x, x)
    assert not isinstance(found, shardwise.ShardedTensor)


@ranks(4)
def test_tensor_parallel_rest() -> None:
    """The router and the layers around are cut; the block computes with the whole router."""
    plain, x = list_model("mask"), batch()
    rest = {"before.*": 0, "block.router.*": 0, "behind.weight": 1}
    twin = twin_of(plain, placement=PLACEMENTS["none on ranks 0 and 2"], rest=rest)
    assert_alike(twin, plain, x, x)


@ranks(4)
def test_own_batches() -> None:
    """Under the old system's rule, plain samples are each rank's own, and so is the result."""
    plain, x = list_model("hit"), batch()
    mine = x.split([5, 0, 12, 6])[dist.get_rank()]
    with shardwise.settings.own_batches(True):
        twin = twin_of(plain, placement=PLACEMENTS["copies"])
        for _ in range(2):
            found = twin.block(mine)
    torch.testing.assert_close(found, plain.block(mine))


@ranks(4)
def test_rows_travel_in_exact_numbers() -> None:
    """A row for each choice of an expert elsewhere, there and back, and as much for their gradients."""
    plain, x = list_model("hit", width=32, choices=3), torch.randn(40, 32, dtype=torch.float64)
    dist.broadcast(x, 0)
    placement, sizes = PLACEMENTS["in order"], [13, 7, 20, 0]
    twin = twin_of(plain, placement=placement).block
    _, _, chosen = plain.block.chosen(x)
    where, rank = torch.tensor(placement)[chosen].split(sizes), dist.get_rank()
    out = int((where[rank] != rank).sum())
    back = sum(int((rows == rank).sum()) for peer, rows in enumerate(where) if peer != rank)
    twin(own(x, sizes))
    with shardwise.trace() as trace:
        twin(own(x, sizes).requires_grad_()).sum().backward()
    exchanges = [event for event in trace.events if event.kind == "exchange"]
    row = 32 * 8
    there = row + 8  # with the number of the expert, aligned
    assert [event.sent for event in exchanges] == [out * there, back * row, out * row, back * row]
    assert [event.received for event in exchanges] == [back * there, out * row, back * row, out * row]


@ranks(2)
def test_recomputed_frozen_and_copied() -> None:
    """Activations that are recomputed, experts without gradients, a copy of the model, and no graph."""
    plain, x = list_model("mask"), batch()
    plain.block.experts.requires_grad_(False)
    twin = copy.deepcopy(twin_of(plain, placement=[0, 1, 0, 1, 1, 1, 1]))
    given = own(x, [3, 20])
    (plain(x) ** 2).sum().backward()
    twin(given)
    (checkpoint(twin, given, use_reentrant=False) ** 2).sum().backward()
    assert_same_gradients(twin, plain)
    forward = experts_forward(twin.block.experts)
    assert forward is not None
    assert forward.chosen is not None
    assert int(forward.chosen.sum()) == 2 * 2 * len(given.local_tensor())
    with torch.no_grad():
        found = twin(own(x, [0, 23]))
    torch.testing.assert_close(whole(found), plain(x).detach(), rtol=ROUNDING, atol=ROUNDING)


@ranks(4)
def test_rebalanced_between_steps() -> None:
    """Experts and their states move, and training goes on as that of the plain twin."""
    plain, x = list_model("mask"), batch()
    twin = twin_of(plain, placement=PLACEMENTS["in order"])
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (plain, twin)]
    for room in (None, [3, 3, 2, 2], [0, 5, 1, 1]):
        for model, optimizer, given in zip((plain, twin), optimizers, (x, own(x)), strict=True):
            optimizer.zero_grad()
            (model(given) ** 2).sum().backward()
            optimizer.step()
        (found,) = shardwise.rebalance(twin, [60, 5, 5, 30, 1, 2, 3], room=room, optimizer=optimizers[1])
        assert found.layer == "block.experts"
        assert found.moved > 0
        for expert, where in zip(twin.block.experts, found.after, strict=True):
            assert sorted(expert.down.weight.sharding.elements_by_rank()) == sorted(where)
    for one, other in zip(plain.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(whole(other), one.detach(), rtol=1e-9, atol=1e-9)


class WithLoss(HitBlock):
    """Gives the mean of the scores of all tokens, too."""

    def forward(self, x: Any) -> Any:
        """The result, and a number."""
        return super().forward(x), self.router(x).mean()


class Keeping(HitBlock):
    """Keeps the mean of the scores."""

    def forward(self, x: Any) -> Any:
        """The result alone."""
        self.loss = self.router(x).mean()
        return super().forward(x)


class Noisy(HitBlock):
    """Draws numbers."""

    def forward(self, x: Any) -> Any:
        """The result alone."""
        return super().forward(x + torch.rand_like(x))


class ChosenByExperts(ListBlock):
    """Each expert takes the tokens with the highest scores."""

    def forward(self, x: Any) -> Any:
        """The result alone."""
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weights, token = torch.topk(self.router(x)[:, number], min(3, len(x)))
            result = result.index_add(0, token, expert(x[token]) * weights[:, None])
        return result


class Chain(ListBlock):
    """Experts one behind another."""

    def forward(self, x: Any) -> Any:
        """The result alone."""
        for expert in self.experts:
            x = x + expert(x)
        return x


class Named(ListBlock):
    """Experts called by keywords."""

    def forward(self, x: Any) -> Any:
        """The result alone."""
        return self.experts[0](x=x)


class Counting(nn.Module):
    """An expert with a buffer that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        """Scaled."""
        self.seen += len(x)
        return x * self.scale


class Counted(HitBlock):
    """With such experts."""

    def expert(self, width: int) -> nn.Module:
        """One of them."""
        return Counting()


REFUSED: dict[type[ListBlock], str] = {
    WithLoss: "its result 1, of size",
    Keeping: "keeps a value",
    Noisy: "draws random numbers",
    ChosenByExperts: "other samples beside",
    Chain: "depend on results of others",
    Named: "is called with tensors",
    Counted: "changes a buffer",
}


@ranks(4)
def test_blocks_that_need_all_samples_are_refused_on_every_rank() -> None:
    """Rank 1 has no samples and cannot know; nobody computes something else than the plain block."""
    for kind, message in REFUSED.items():
        torch.manual_seed(0)
        twin = twin_of(ListModel(kind()).double(), placement=PLACEMENTS["in order"])
        for _ in range(2):
            with pytest.raises(shardwise.errors.ShardwiseError, match=message):
                twin.block(own(batch()))
    plain = list_model("hit")
    assert_alike(twin_of(plain), plain, own(batch()), batch())


@ranks(2)
def test_experts_are_not_called_alone() -> None:
    """Nor the list of them."""
    twin = twin_of(list_model("hit"))
    for one in (twin.block.experts[0], twin.block.experts):
        with pytest.raises(PropertyError, match="the module that has"):
            one(batch())


@ranks(2)
def test_lists_that_cannot_be() -> None:
    """Experts that share a parameter, a list that is the model, and one without parameters."""
    model: Any = list_model("hit")
    model.block.experts[1].up.weight = model.block.experts[0].up.weight
    with pytest.raises(PlanError, match="this one is shared"):
        plans.expert_parallel(model)
    with pytest.raises(PlanError, match="no layer of experts"):
        plans.expert_parallel(nn.ModuleList([nn.Linear(2, 2)]))
    with pytest.raises(PlanError, match="a list without parameters"):
        plans.expert_parallel(nn.ModuleDict({"other": nn.ModuleList([nn.ReLU()])}), experts="other")
