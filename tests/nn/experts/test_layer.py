"""A layer of experts by hand: every placement, every way in which tokens lie, bytes, errors, and training."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ROUNDING, places
from tests.models.twins import assert_same_gradients, whole
from tests.nn.experts.cases import Experts, Mixture, mixture
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import GridShardingSpec, ReplicatedShardingSpec, ShardedTensor, from_local, plans, shard_module
from shardwise.autograd import buckets
from shardwise.errors import IdRangeError, PlanError, PlanNameError, PropertyError
from shardwise.nn.experts.layer import experts_forward
from shardwise.nn.experts.local_experts import stacked
from shardwise.nn.experts.route import make_expert_route
from shardwise.testing import ranks

PLACEMENTS: dict[str, Any] = {
    "in order": [0, 0, 1, 1, 2, 2, 3],
    "none on ranks 0 and 2": [1, 1, 3, 1, 3, 3, 3],
    "all on one rank": [2] * 7,
    "in turn": [0, 1, 2, 3, 0, 1, 2],
    "copies": [[0, 1, 2, 3], [1, 3], 0, [0, 1], 2, 2, [3, 2, 0]],
    "whole on every rank": [[0, 1, 2, 3]] * 7,
}
TOKENS = 23
SIZES = [5, 0, 12, 6]  # of each rank


def batch(tokens: int = TOKENS) -> torch.Tensor:
    """The same on every rank."""
    return torch.randn(tokens, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def own(x: torch.Tensor, sizes: list[int] = SIZES) -> ShardedTensor:
    """Each rank's own part of it."""
    return from_local(x.split(sizes)[dist.get_rank()], sizes=sizes)


def twin_of(plain: Mixture, **options: Any) -> Mixture:
    """A copy with experts on ranks."""
    model = copy.deepcopy(plain)
    return shard_module(model, plans.expert_parallel(model, **options))


def assert_alike(twin: Mixture, plain: Mixture, given: Any, x: torch.Tensor) -> Any:
    """The same result and gradients, those of the input included."""
    plain.zero_grad()
    twin.zero_grad()
    x = x.clone().requires_grad_()
    given = given.clone().detach().requires_grad_()
    expected, found = plain(x), twin(given)
    torch.testing.assert_close(whole(found), expected.detach(), rtol=ROUNDING, atol=ROUNDING)
    (expected**2).sum().backward()
    (found**2).sum().backward()
    assert_same_gradients(twin, plain)
    torch.testing.assert_close(whole(given.grad), x.grad, rtol=ROUNDING, atol=ROUNDING)
    return found


@pytest.mark.parametrize("choices", [1, 3])
@ranks(4)
def test_placements(choices: int) -> None:
    """Experts in any numbers on ranks, copies included, from tokens of each rank's own, of which one has none."""
    plain = mixture(choices=choices)
    for name, placement in PLACEMENTS.items():
        twin = twin_of(plain, placement=placement)
        assert twin.experts.down.sharding.elements_by_rank().get(1, 0) % 30 == 0, name
        for _ in range(2):
            assert_alike(twin, plain, own(batch()), batch())


class FromTheLast(Experts):
    """With its parameters in the order of their gradients, not of their use."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.up, self.down, self.bias = (self._parameters.pop(name) for name in ("up", "down", "bias"))
        self._parameters = {name: self._parameters[name] for name in ("bias", "down", "up")}


@ranks(4)
def test_copies_without_tokens_add_up_in_the_same_order() -> None:
    """Rank 1 has copies of all experts and no tokens: its backward knows no order by itself."""
    plain, x = mixture(), batch()
    torch.manual_seed(0)
    plain.experts = FromTheLast(7).double()
    assert list(dict(plain.experts.named_parameters())) == ["bias", "down", "up"]
    twin = twin_of(plain, placement=PLACEMENTS["whole on every rank"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "BUCKET_BYTES", 1)  # each gradient is sent as soon as it is there
        assert_alike(twin, plain, own(x), x)


@ranks(4)
def test_tokens_in_any_layout() -> None:
    """Several boxes on a rank, replicas, cut through tokens, plain, and in two dims; the result lies as they do."""
    plain, x = mixture(), batch()
    twin = twin_of(plain, placement=PLACEMENTS["copies"])
    several = GridShardingSpec((0,), places(2, 0, 2, 3, 0), sizes=[[4, 6, 2, 10, 1]])
    through = GridShardingSpec((0, 1), [places(0, 1), places(2, 3)])
    replicas = ReplicatedShardingSpec(places(0, 1, 2, 3))
    some = GridShardingSpec((None, 0), [places(0, 1), places(2, 3)])
    for spec in (several, through, replicas, some):
        given = shardwise.shard(x, spec)
        assert_alike(twin, plain, given, x)
        weights, chosen = torch.topk(torch.softmax(twin.router(given), -1), 2, -1)
        assert twin.experts(given, chosen, weights).sharding == given.sharding
    found = assert_alike(twin, plain, x, x)
    assert type(found) is not ShardedTensor
    weights, chosen = torch.topk(torch.softmax(plain.router(x[:20]), -1), 2, -1)
    samples = [one.detach().view(4, 5, -1) for one in (x[:20], chosen, weights)]
    result = twin.experts(*(from_local(one[dist.get_rank()][None]) for one in samples))
    torch.testing.assert_close(whole(result).flatten(0, 1), plain.experts(x[:20], chosen, weights).detach())


@ranks(4)
def test_in_a_group_of_some_ranks() -> None:
    """Ranks are named as in the world."""
    group = dist.new_group([1, 3, 2])
    if dist.get_rank() == 0:
        return
    plain, x = mixture(), batch()
    model = copy.deepcopy(plain)
    plan = plans.expert_parallel(model, placement=[3, 3, 1, 1, 3, 3, 3], process_group=group)
    twin = shard_module(model, plan, process_group=group)
    part = x.split([10, 10, 3])[dist.get_rank(group)]
    assert_alike(twin, plain, from_local(part, process_group=group), x)


@ranks(4)
def test_own_batches() -> None:
    """Under the old system's rule, plain tokens are each rank's own, and so is the result."""
    plain, x = mixture(), batch()
    with shardwise.settings.own_batches(True):
        twin = twin_of(plain, placement=PLACEMENTS["copies"])
        mine = x.split(SIZES)[dist.get_rank()]
        weights = torch.full((len(mine), 2), 0.5, dtype=torch.float64)
        chosen = torch.stack([torch.arange(len(mine)) % 7, torch.arange(len(mine)) % 3], 1)
        found = twin.experts(mine, chosen, weights)
    torch.testing.assert_close(found, plain.experts(mine, chosen, weights), rtol=ROUNDING, atol=ROUNDING)


@ranks(2)
def test_own_sequences_of_any_length() -> None:
    """Each rank's own samples and positions, and a rank whose choices do not fit its tokens: every rank raises."""
    plain = mixture()
    with shardwise.settings.own_batches(True):
        twin = twin_of(plain, placement=[0, 0, 0, 1, 1, 1, 1])
        mine = torch.randn(2, 3 + dist.get_rank(), plain.router.in_features, dtype=torch.float64)
        chosen = torch.randint(7, (*mine.shape[:2], 2))
        weights = torch.full(chosen.shape, 0.5, dtype=torch.float64)
        found = twin.experts(mine, chosen, weights)
        expected = plain.experts(mine.flatten(0, 1), chosen.flatten(0, 1), weights.flatten(0, 1))
        torch.testing.assert_close(found.flatten(0, 1), expected, rtol=ROUNDING, atol=ROUNDING)
        with pytest.raises(shardwise.errors.ShardwiseError, match="experts take tokens"):
            twin.experts(mine, chosen, weights[:, : 3 if dist.get_rank() == 0 else 1])


@ranks(4)
def test_bytes() -> None:
    """A token goes once to each other rank that has experts of its choice, and one row comes back; no more."""
    plain, x = mixture(choices=3, width=32), torch.randn(40, 32, dtype=torch.float64)
    dist.broadcast(x, 0)
    placement = [0, 0, 1, 1, 2, 2, 3]
    twin = twin_of(plain, placement=placement)
    weights, chosen = torch.topk(torch.softmax(plain.router(x), -1), 3, -1)
    sizes = [13, 7, 20, 0]
    where = torch.tensor(placement)[chosen].split(sizes)
    rank = dist.get_rank()
    there = [sum(rank in row and rank != peer for row in rows.tolist()) for peer, rows in enumerate(where)]
    here = sum(len(set(row) - {rank}) for row in where[rank].tolist())
    given = [own(one.detach(), sizes) for one in (x, chosen, weights)]
    given[0].requires_grad_()
    with shardwise.trace() as trace:
        twin.experts(*given).sum().backward()
    out, back, *gradients = [event for event in trace.events if event.kind == "exchange"]
    row, choices = 32 * 8, 3 * (8 + 4) + 4  # weights, and numbers of experts, of which a row has an even number
    assert out.op == back.op == "experts"
    assert out.module == "Experts"
    assert (out.sent, out.received) == (here * (row + choices), sum(there) * (row + choices))
    assert (back.sent, back.received) == (sum(there) * row, here * row)
    assert (gradients[0].sent, gradients[1].sent) == (here * row, sum(there) * (row + 3 * 8))
    assert len(gradients) == 2


@ranks(4)
def test_explained_without_values() -> None:
    """As if tokens chose all experts alike: the same collectives as in a real step, of sizes that values decide."""
    plain, x = mixture(), own(batch(400), [100] * 4)
    twin = twin_of(plain, placement=[0, 0, 1, 1, 2, 2, 3])

    def step() -> None:
        (twin(x) ** 2).sum().backward()

    told = shardwise.explain(step)
    with shardwise.trace() as trace:
        step()
    exchanges, real = ([event for event in one.events if event.kind == "exchange"] for one in (told, trace))
    assert [event.op for event in exchanges] == [event.op for event in real]
    assert len(exchanges) == 4
    (numbers,) = [one for one in trace.events if one.kind == "meeting" and one.op == "experts"]
    assert [one.sent for one in told.meetings if one.op == "experts"] == [numbers.sent]
    assert not told.stopped
    assert not any(event.known for event in exchanges)
    # Of 7 experts this rank has 2 or 1, and a token chooses 2: it misses them in 10 or 15 of 21 cases.
    misses = [10 / 21, 10 / 21, 10 / 21, 15 / 21]
    assert exchanges[0].received == 3 * int(100 * (1 - misses[dist.get_rank()])) * (6 * 8 + 2 * (8 + 4))


@ranks(4)
def test_training_saving_and_loading(tmp_path: Path) -> None:
    """AdamW, clipped gradients, and a checkpoint that goes on under another placement."""
    plain, x = mixture(), batch()
    first = twin_of(plain, placement=PLACEMENTS["copies"], rest=plans.FullyShard())
    second = twin_of(mixture(), placement=PLACEMENTS["none on ranks 0 and 2"], rest=plans.FullyShard())
    steps = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (first, second)]

    def step(model: Mixture, optimizer: torch.optim.Optimizer, given: Any) -> None:
        optimizer.zero_grad()
        (model(given) ** 2).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    for _ in range(2):
        step(plain, steps, x)
        step(first, optimizers[0], own(x))
    shardwise.save({"model": first, "optimizer": optimizers[0]}, tmp_path / "state")
    shardwise.load({"model": second, "optimizer": optimizers[1]}, tmp_path / "state")
    for _ in range(2):
        step(plain, steps, x)
        step(second, optimizers[1], own(x))
    for one, other in zip(plain.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(whole(other), one.detach(), rtol=1e-9, atol=1e-9)


@ranks(2)
def test_recomputed_and_copied() -> None:
    """Activations that are recomputed in the backward, of a copy of the layer; choices count once."""
    plain, x = mixture(), batch()
    twin = copy.deepcopy(twin_of(plain, placement=[0, 1, 0, 1, 1, 1, 1]))
    given = own(x, [3, 20])
    (plain(x) ** 2).sum().backward()
    (checkpoint(twin, given, use_reentrant=False) ** 2).sum().backward()
    assert_same_gradients(twin, plain)
    forward = experts_forward(twin.experts)
    assert forward is not None
    assert forward.local.module is twin.experts
    chosen = forward.chosen
    assert chosen is not None
    assert int(chosen.sum()) == 2 * len(given.local_tensor())


@ranks(4)
@pytest.mark.parametrize("placement", ["in order", "none on ranks 0 and 2", "copies"])
def test_gradients_of_gradients(placement: str) -> None:
    """Of tokens and of the weights of their choices, through ranks without tokens and without experts."""
    plain = mixture()
    twin = twin_of(plain, placement=PLACEMENTS[placement])
    x = batch()
    weights, chosen = (one.detach() for one in torch.topk(torch.softmax(plain.router(x), -1), 2, -1))

    def twice(layer: Any, chosen: Any, *leaves: Any) -> list[Any]:
        tokens, weights = (one.detach().requires_grad_() for one in leaves)
        grads = torch.autograd.grad((layer(tokens, chosen, weights) ** 3).sum(), (tokens, weights), create_graph=True)
        (grads[0] ** 2).sum().add((grads[1] ** 2).sum()).backward()
        return [*grads, tokens.grad, weights.grad]

    expected = twice(plain.experts, chosen, x, weights)
    found = twice(twin.experts, own(chosen), own(x), own(weights))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(whole(one.detach()), other.detach(), rtol=ROUNDING, atol=ROUNDING)


@ranks(2)
def test_several_runs_of_experts_are_one_tensor() -> None:
    """Those of a rank lie one behind another, so that none is copied in a forward; after resharding they are copied."""
    twin = twin_of(mixture(), placement=[0, 1, 0, 1, 0, 1, 0])
    parts = twin.experts.up._local_tensors()
    assert len(parts) > 2
    assert stacked(parts).data_ptr() == parts[0].data_ptr()
    assert torch.equal(stacked(parts), torch.cat(parts))
    grads = torch.autograd.grad((stacked(parts) ** 2).sum(), parts)
    for grad, part in zip(grads, parts, strict=True):
        torch.testing.assert_close(grad, 2 * part)
    apart = [part.clone() for part in parts]
    assert torch.equal(stacked(apart), torch.cat(parts))


@ranks(2)
def test_without_gradients_of_some() -> None:
    """Frozen experts, a frozen rest, and no graph at all."""
    plain, x = mixture(), batch()
    for frozen in ("experts", "before router behind"):
        one = copy.deepcopy(plain)
        for name in frozen.split():
            one.get_submodule(name).requires_grad_(False)
        twin = twin_of(one, placement=[1] * 7)
        assert_alike(twin, one, own(x, [20, 3]), x)
    with torch.no_grad():
        found = twin(own(x, [0, 23]))
    torch.testing.assert_close(whole(found), plain(x).detach(), rtol=ROUNDING, atol=ROUNDING)


@ranks(2)
def test_errors_come_on_every_rank() -> None:
    """A choice of an expert that there is not, on one rank; sizes that do not fit; then the layer works again."""
    plain, x = mixture(), batch()
    twin = twin_of(plain)
    chosen = torch.zeros(TOKENS, 1, dtype=torch.int64)
    weights = torch.ones(TOKENS, 1, dtype=torch.float64)
    wrong = chosen.clone()
    wrong[-1] = 7
    sizes = [20, 3]
    with pytest.raises(IdRangeError, match="expert 7, and there are 7"):
        twin.experts(own(x, sizes), own(wrong, sizes), own(weights, sizes))
    with pytest.raises(PropertyError, match="found sizes"):
        twin.experts(own(x, sizes), own(chosen, sizes), own(weights.expand(-1, 2).contiguous(), sizes))
    assert_alike(twin, plain, own(x, sizes), x)


@ranks(2)
def test_plans_that_cannot_be() -> None:
    """Each with what is wrong."""
    model = mixture()
    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (PlanError, "found 3, and there are 7", {"placement": [0, 1, 0]}),
        (PlanError, "expert 2 lies on one rank", {"placement": [0, 1, 2, 0, 0, 0, 0]}),
        (PlanError, "expert 0 lies on one rank", {"placement": [[], 1, 1, 0, 0, 0, 0]}),
        (PlanError, "expert 0 lies on one rank", {"placement": [[1, 1], 1, 1, 0, 0, 0, 0]}),
        (PlanError, "give one of them", {"placement": [0] * 7, "weights": [1, 2]}),
        (PlanError, "its forward takes", {"experts": "router"}),
        (PlanNameError, "did you mean 'experts'", {"experts": "expert"}),
        (PlanNameError, r"'nothing\.\*\*' is for no layer .* 'experts'", {"placement": {"nothing.**": [0] * 7}}),
        (PlanError, "rest is a plan", {"rest": 3}),
        (PlanError, "several placements", {"placement": {"experts": [0] * 7, "*": [1] * 7}}),
    ]
    for kind, message, options in cases:
        with pytest.raises(kind, match=message):
            plans.expert_parallel(model, **options)
    with pytest.raises(PlanError, match="no layer of experts"):
        plans.expert_parallel(torch.nn.Linear(2, 2))


def test_routes() -> None:
    """Of copies: the own one; the one in the same of equal stretches of ranks; else all in turn."""
    holders = ((0, 2), (1, 3), (0, 1, 2), (3,))
    routes = [make_expert_route(holders, range(4), here, torch.device("cpu")) for here in range(4)]
    index = torch.arange(4).repeat(3, 1)
    found = [(route.targets(index)[0].view(3, 4).T // 2).tolist() for route in routes]
    assert found[0] == [[0, 0, 0], [1, 1, 1], [0, 0, 0], [3, 3, 3]]
    assert found[1] == [[0, 0, 0], [1, 1, 1], [1, 1, 1], [3, 3, 3]]
    assert found[3] == [[2, 2, 2], [3, 3, 3], [0, 1, 2], [3, 3, 3]]
    for sender, receiver in ((2, 2), (3, 0), (3, 1)):
        members, codes = (one.view(3, 4) for one in routes[sender].targets(index))
        numbers, are_here = routes[receiver].experts_here(codes)
        assert torch.equal(are_here, members // 2 == receiver)
        experts = torch.tensor(routes[receiver].experts[receiver])
        assert torch.equal(experts[numbers[are_here]], index[are_here])
