"""What an optimizer looks at: torch's are known, others are declared or refused; whole parameters come when needed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, ROUNDING, chunks
from tests.nn.optim.models import assert_same, batches, loss_of, model, named, sharded, train, whole
from torch import nn
from torch.optim import SGD

from shardwise import ShardedOptimizer, errors
from shardwise.nn.optim import UpdateScope
from shardwise.tensor import shard_tensor
from shardwise.tensor.partial import ReplicatedTensor
from shardwise.testing import ranks


class Signs(torch.optim.Optimizer):
    """Of each gradient the sign; nothing else is looked at."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: D102 # torch's
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign(), alpha=group["lr"])


class Normed(Signs):
    """Of each gradient its direction: the norm of the whole is looked at."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: D102 # torch's
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["norm"] = p.grad.norm()
                    p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


class Clipped(SGD):
    """One of torch's, with a step that looks at more."""

    def step(self, closure: Any = None) -> Any:  # noqa: D102 # torch's
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1)
        return super().step(closure)


class Renamed(SGD):
    """One of torch's, with another constructor."""

    def __init__(self, params: Any, rate: float) -> None:
        super().__init__(params, rate)


@ranks(2)
def test_an_optimizer_that_nobody_has_classified_is_refused() -> None:
    """Also one derived from torch's own that does another step; on plain or whole parameters it may do what it will."""
    twin = sharded(model(), chunks(0, 0, 1, 0), chunks(1, 1, 0))
    for kind in (Signs, Normed, Clipped):
        with pytest.raises(errors.OptimizerError, match=f"UpdateScope\\({kind.__name__}, 'element'\\)"):
            ShardedOptimizer(named(twin), kind, lr=0.1)
        ShardedOptimizer({"2.bias": twin[2].bias, "0.bias": twin[0].bias}, kind, lr=0.1)
    ShardedOptimizer(named(twin), Renamed, 0.1)
    with pytest.raises(errors.OptimizerError, match="scope should be one of element, tensor, model"):
        UpdateScope(Signs, "shard")
    with pytest.raises(errors.OptimizerError, match=r"derived from torch\.optim\.Optimizer"):
        ShardedOptimizer(named(twin), dict)


@pytest.mark.parametrize(
    ("kind", "scope"),
    [
        (Signs, "element"),
        (Signs, "tensor"),
        (Signs, "model"),
        (Normed, "tensor"),
        (Normed, "model"),
        (Clipped, "model"),
    ],
)
@ranks(4)
def test_a_declared_optimizer_trains_as_on_the_plain_twin(kind: Any, scope: Any) -> None:
    """With what it looks at: elements, whole parameters, or all of them; a wider scope than needed is right too."""
    plain = model()
    twin = sharded(plain, ALL["uneven, several per rank"], chunks(0, 0, 1, 2))
    ours, theirs = ShardedOptimizer(named(twin), UpdateScope(kind, scope), lr=0.1), kind(plain.parameters(), lr=0.1)
    train(plain, theirs, batches(3))
    train(twin, ours, batches(3))
    assert_same(twin, plain, gradients=not issubclass(kind, SGD))  # Clipped changes those that it is given
    other = ShardedOptimizer(named(twin), UpdateScope(kind, scope), lr=0.1)
    other.load_state_dict(ours.state_dict())
    for name, entry in ours.state_dict()["state"].items():
        assert all(torch.equal(value, other.state_dict()["state"][name][key]) for key, value in entry.items())


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@ranks(4)
def test_lbfgs_goes_the_way_of_the_plain_twin(line_search: str | None) -> None:
    """All parameters at once, on every rank; the closure is called as often, and the state can be saved and loaded."""
    plain = model()
    twin = sharded(plain, ALL["uneven, several per rank"], chunks(0, 0, 1, 2))
    options = {"lr": 0.5, "max_iter": 5, "history_size": 4, "line_search_fn": line_search}
    ours = ShardedOptimizer(named(twin), torch.optim.LBFGS, **options)
    theirs = torch.optim.LBFGS(plain.parameters(), **options)
    batch = batches(1)[0]
    calls = []

    def closure_for(one: nn.Module, optimizer: Any, x: Any) -> Any:
        def closure() -> torch.Tensor:
            calls.append(one)
            optimizer.zero_grad()
            loss = loss_of(one, x)
            loss.backward()
            return loss

        return closure

    for turn in range(3):
        found = ours.step(closure_for(twin, ours, ReplicatedTensor(batch)))
        expected = theirs.step(closure_for(plain, theirs, batch))
        assert found.item() == pytest.approx(expected.item(), rel=ROUNDING)
        assert_same(twin, plain)
        if turn == 1:
            again = ShardedOptimizer(named(twin), torch.optim.LBFGS, **options)
            again.load_state_dict(copy.deepcopy(ours.state_dict()))
            ours = again
    assert calls.count(twin) == calls.count(plain) > 6


@ranks(4)
def test_a_step_that_fails_on_the_owner_fails_everywhere() -> None:
    """And the parameters, on all ranks, are as before."""
    weight = shard_tensor(torch.ones(4, 4), chunks(0, 0, 1, 2, 3)).requires_grad_()
    ours = ShardedOptimizer({"w": weight}, UpdateScope(Failing, "tensor"), lr=0.1)
    weight.sum().backward()
    with pytest.raises(ArithmeticError, match="not today"):
        ours.step()
    assert torch.equal(whole(weight), torch.ones(4, 4))


class Failing(Signs):
    """Refuses whatever parameter there is."""

    def step(self, closure: Any = None) -> Any:  # noqa: D102 # torch's
        if self.param_groups[0]["params"]:
            raise ArithmeticError("not today")


@ranks(2)
def test_ranks_that_compute_another_loss_are_told() -> None:
    """Instead of going different ways until one waits for the other."""
    twin = sharded(model(), chunks(0, 0, 1, 0), chunks(1, 1, 0))
    ours = ShardedOptimizer(named(twin), torch.optim.LBFGS)

    def closure() -> torch.Tensor:
        loss_of(twin, ReplicatedTensor(batches(1)[0])).backward()
        return torch.tensor(float(dist.get_rank()))

    with pytest.raises(errors.RankMismatchError, match=r"loss=0\.0 on rank 0, loss=1\.0 on rank 1"):
        ours.step(closure)


@pytest.mark.parametrize("kind", ["LBFGS", "Adafactor"])
@ranks(4)
def test_a_closure_that_raises_on_one_rank_raises_on_all(kind: str) -> None:
    """At once, and the next step is in order again."""
    weight = shard_tensor(torch.ones(4, 4), chunks(0, 0, 1, 2, 3)).requires_grad_()
    ours = ShardedOptimizer({"w": weight}, getattr(torch.optim, kind))
    raising = True

    def closure() -> Any:
        ours.zero_grad()
        loss = weight.pow(2).sum()
        loss.backward()
        if raising and dist.get_rank() == 2:
            raise ArithmeticError("not here")
        return loss

    with pytest.raises(ArithmeticError, match="not here"):
        ours.step(closure)
    assert torch.equal(whole(weight), torch.ones(4, 4))
    raising = False
    assert ours.step(closure).item() == 16
    assert not torch.equal(whole(weight), torch.ones(4, 4))


@ranks(2)
def test_ranks_that_ask_for_different_options_are_told() -> None:
    """Each would train its shards in its own way."""
    weight = shard_tensor(torch.ones(4, 4), chunks(0, 0, 1)).requires_grad_()
    with pytest.raises(errors.RankMismatchError, match=r"lr: 0\.1.*does not match with.*lr: 0\.2"):
        ShardedOptimizer({"w": weight}, SGD, lr=0.1 * (1 + dist.get_rank()))


FOREACH = ["SGD", "AdamW", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adadelta", "Adafactor"]


@pytest.mark.parametrize("kind", [*FOREACH, "Muon"])
@ranks(2)
def test_a_rank_that_holds_nothing_at_all_takes_part(kind: str) -> None:
    """In steps, and in saving and loading; it sees the same names, keys and sizes."""
    weight = shard_tensor(torch.ones(3, 2), chunks(0, 1)).requires_grad_()
    ours = ShardedOptimizer({"w": weight}, getattr(torch.optim, kind), **({"foreach": True} if kind in FOREACH else {}))
    for _ in range(2):
        ours.zero_grad()
        weight.pow(2).sum().backward()
        ours.step()
        ours.load_state_dict(ours.state_dict())
    outline = {key: getattr(value, "shape", None) for key, value in ours.state_dict()["state"]["w"].items()}
    told: list[Any] = [None, None]
    dist.all_gather_object(told, outline)
    assert told[0] == told[1]
    assert bool(outline) == (kind != "SGD")
    assert not torch.equal(whole(weight), torch.ones(3, 2))


@ranks(1)
def test_without_sharded_parameters_it_is_torchs() -> None:
    """Any class, bit for bit, with no communication."""
    plain, twin = model(), model()
    ours, theirs = ShardedOptimizer(named(twin), Clipped, lr=0.1), Clipped(plain.parameters(), lr=0.1)
    assert train(twin, ours, batches(3)) == train(plain, theirs, batches(3))
    ours.load_state_dict(ours.state_dict())
