"""The optimizer in use: groups, closures, schedulers, loss scaling, hooks, copies, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ROUNDING, assert_close, chunks, places
from tests.nn.optim.models import assert_same, batches, loss_of, model, named, sharded, train, whole
from torch import nn
from torch.optim import SGD, Adagrad, AdamW
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise import ReplicatedShardingSpec, ShardedOptimizer, check, errors, from_local, trace
from shardwise.tensor import shard_tensor
from shardwise.tensor.partial import ReplicatedTensor
from shardwise.testing import ranks


def pair() -> tuple[Any, Any]:
    """The plain model, and a sharded twin on two ranks."""
    plain = model()
    return plain, sharded(plain, chunks(0, 0, 1, 0), chunks(1, 1, 0))


@ranks(2)
def test_groups_have_names_and_options() -> None:
    """A list of groups, each with options of its own, and one added later."""
    plain, twin = pair()
    ours = ShardedOptimizer(
        [{"params": {"0.weight": twin[0].weight}, "lr": 0.3}, {"params": [("0.bias", twin[0].bias)]}], SGD, lr=0.1
    )
    theirs = SGD([{"params": [plain[0].weight], "lr": 0.3}, {"params": [plain[0].bias]}], lr=0.1)
    rest = {name: p for name, p in named(twin).items() if name not in ours.named_params}
    ours.add_param_group({"params": rest, "lr": 0.01, "momentum": 0.9})
    theirs.add_param_group({"params": [plain.get_parameter(name) for name in rest], "lr": 0.01, "momentum": 0.9})
    train(plain, theirs, batches(3))
    train(twin, ours, batches(3))
    assert_same(twin, plain)
    assert ours.param_groups[0]["param_names"] == ["0.weight"]
    assert ours.param_groups[0]["params"][0] is twin[0].weight
    assert ours.named_params == named(twin)
    saved = ours.state_dict()["param_groups"]
    assert [group["params"] for group in saved] == [["0.weight"], ["0.bias"], list(rest)]
    assert "group 2: 2.weight, 2.bias, 3.weight, 3.bias; lr=0.01" in repr(ours)


@ranks(2)
def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was() -> None:
    """On one rank the options are wrong, or the name is there already: no rank has another group."""
    _, twin = pair()
    ours = ShardedOptimizer({"0.weight": twin[0].weight}, SGD, lr=0.1)
    with pytest.raises(errors.OptimizerError, match="in more than one group"):
        ours.add_param_group({"params": {"0.weight": twin[2].weight}})
    with pytest.raises(errors.OptimizerError, match=r"'0\.weight' and 'again' are the same tensor"):
        ours.add_param_group({"params": {"again": twin[0].weight}})
    name = f"name {dist.get_rank()}"
    with pytest.raises(errors.RankMismatchError, match=r"name 0.*does not match with.*name 1"):
        ours.add_param_group({"params": {name: twin[2].weight}})
    assert len(ours.param_groups) == len(ours._roster.inner.param_groups) == 1
    train(twin, ours, batches(1))


@pytest.mark.parametrize("kind", ["SGD", "Adafactor"])
@ranks(2)
def test_a_closure_gives_its_loss(kind: str) -> None:
    """`step(closure)` returns what the closure returns, computed with gradients on."""
    plain, twin = pair()
    ours = ShardedOptimizer(named(twin), getattr(torch.optim, kind), lr=0.1)
    theirs = getattr(torch.optim, kind)(plain.parameters(), lr=0.1)
    batch = batches(1)[0]
    losses = []
    for one, optimizer, x in ((twin, ours, ReplicatedTensor(batch)), (plain, theirs, batch)):

        def closure(one: Any = one, optimizer: Any = optimizer, x: Any = x) -> Any:
            optimizer.zero_grad()
            loss = loss_of(one, x)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    assert losses[0] == pytest.approx(losses[1], rel=ROUNDING)
    assert_same(twin, plain)


SCHEDULERS: dict[str, Any] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=5),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@ranks(2)
def test_schedulers_change_the_learning_rate(name: str) -> None:
    """Of ShardedOptimizer as of a plain one, momentum too where they do."""
    plain, twin = pair()
    ours, theirs = ShardedOptimizer(named(twin), AdamW, lr=0.1), AdamW(plain.parameters(), lr=0.1)
    schedulers = SCHEDULERS[name](ours), SCHEDULERS[name](theirs)
    for batch in batches(4):
        train(twin, ours, batch[None])
        train(plain, theirs, batch[None])
        for scheduler in schedulers:
            scheduler.step()
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] != 0.1
    assert_same(twin, plain)


@pytest.mark.parametrize("kind", ["AdamW", "Adafactor"])
@ranks(4)
def test_all_ranks_skip_a_step_or_none(kind: str) -> None:
    """With loss scaling: an inf in one shard of one rank, and every rank skips, halves the scale, and goes on alike."""
    plain = model()
    twin = sharded(plain, chunks(0, 0, 1, 2), chunks(1, 1, 0))  # rank 3 has no shard of either
    make = getattr(torch.optim, kind)
    ours, theirs = ShardedOptimizer(named(twin), make), make(plain.parameters())
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000) for _ in range(2)]
    for turn, batch in enumerate(batches(4)):
        for one, optimizer, scaler, x in zip(
            (twin, plain), (ours, theirs), scalers, (ReplicatedTensor(batch), batch), strict=True
        ):
            optimizer.zero_grad()
            scaler.scale(loss_of(one, x)).backward()
            if turn == 1:
                spoil(one[0].weight)
            if turn == 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale() == (1024 if turn == 0 else 512)
    assert_same(twin, plain)


def spoil(weight: torch.Tensor) -> None:
    """An inf in the gradient of row 4, wherever that is."""
    rows = weight.grad.local_shards() if hasattr(weight, "local_shards") else None
    if rows is None:
        weight.grad[4, 0] = float("inf")  # type: ignore[index] # there is one
    for shard in rows or []:
        first = shard.metadata.shard_offsets[0]
        if first <= 4 < first + shard.metadata.shard_sizes[0]:
            shard.tensor[4 - first, 0] = float("inf")


@ranks(2)
def test_hooks_are_called_once() -> None:
    """Around a step and around state dicts; those for all optimizers too."""
    _, twin = pair()
    ours = ShardedOptimizer(named(twin), SGD, lr=0.1, momentum=0.9)
    called = []
    handles = [
        ours.register_step_pre_hook(lambda *_: called.append("before")),
        ours.register_step_post_hook(lambda *_: called.append("after")),
        register_optimizer_step_pre_hook(lambda *_: called.append("any")),
    ]
    train(twin, ours, batches(1))
    for handle in handles:
        handle.remove()
    assert sorted(called) == ["after", "any", "before"]
    ours.register_state_dict_pre_hook(lambda _: called.append("saving"))
    ours.register_state_dict_post_hook(lambda _, made: {**made, "extra": 1})
    ours.register_load_state_dict_pre_hook(lambda _, given: called.append(given.pop("extra")))
    ours.register_load_state_dict_post_hook(lambda _: called.append("loaded"))
    ours.load_state_dict(ours.state_dict())
    assert called[3:] == ["saving", 1, "loaded"]


@pytest.mark.parametrize("options", [{}, {"foreach": True}])
@ranks(4)
def test_gradients_go(options: Any) -> None:
    """Or are set to zero in their place, on a rank without shards too."""
    twin = sharded(model(), chunks(0, 0, 1, 2), chunks(1, 1, 0))
    ours = ShardedOptimizer(named(twin), SGD, lr=0.1, **options)
    loss_of(twin, ReplicatedTensor(batches(1)[0])).backward()
    ours.zero_grad(set_to_none=False)
    assert all(not whole(p.grad).any() for p in twin.parameters())
    ours.zero_grad()
    assert all(p.grad is None for p in twin.parameters())


@ranks(2)
def test_a_shard_that_nothing_depended_on_is_updated_too() -> None:
    """Its gradient is zero, as in the plain tensor, so decay and momentum act on it."""
    plain = torch.arange(42.0, dtype=torch.float64).reshape(7, 6)
    twin = shard_tensor(plain, chunks(0, 0, 1, 0, 1)).requires_grad_()
    plain.requires_grad_()
    for one, optimizer in (
        (twin, ShardedOptimizer({"w": twin}, SGD, lr=0.1, weight_decay=0.5)),
        (plain, SGD([plain], lr=0.1, weight_decay=0.5)),
    ):
        one[:2].sum().backward()
        optimizer.step()
    assert_close(whole(twin), plain.detach())


@pytest.mark.parametrize("kind", ["SparseAdam", "SGD", "Adagrad"])
@ranks(2)
def test_sparse_gradients_of_a_table(kind: str) -> None:
    """Each shard is updated in the rows that were looked up, by whichever rank."""
    table = torch.arange(24.0, dtype=torch.float64).reshape(8, 3)
    ids = torch.tensor([[0, 5, 5], [1, 0, 7]])
    twin = shard_tensor(table, chunks(0, 0, 1, 0, 1)).requires_grad_()
    plain = table.clone().requires_grad_()
    make = getattr(torch.optim, kind)
    ours, theirs = ShardedOptimizer({"w": twin}, make, lr=0.1), make([plain], lr=0.1)
    for _ in range(2):
        ours.zero_grad()
        theirs.zero_grad()
        nn.functional.embedding(from_local(ids[dist.get_rank()]), twin, sparse=True).pow(2).sum().backward()
        nn.functional.embedding(ids.flatten(), plain, sparse=True).pow(2).sum().backward()
        with torch.sparse.check_sparse_tensor_invariants(False):  # Adagrad makes some, and warns if nothing is said
            ours.step()
            theirs.step()
    assert_close(whole(twin), plain.detach())


@ranks(2)
def test_what_is_no_named_parameter_is_refused() -> None:
    """With words that say what is expected."""
    _, twin = pair()
    for given, words in (
        (twin.parameters(), "every parameter needs a name"),
        ({}, "empty parameter list"),
        ({"w": 5}, "'w' should be a tensor, found int"),
        (twin[0].weight, "expected a mapping or a list"),
        ([{"lr": 1}], "a dict with 'params'"),
        ([("w", twin[0].weight), ("w", twin[2].weight)], "two parameters are named 'w'"),
    ):
        with pytest.raises(errors.OptimizerError, match=words):
            ShardedOptimizer(given, SGD, lr=0.1)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        ShardedOptimizer(named(twin), SGD, lr=-1)
    with pytest.raises(ValueError, match=r"(?s)only supports 2D parameters.*found on rank"):
        ShardedOptimizer({"b": shard_tensor(torch.ones(4), chunks(0, 0, 1))}, torch.optim.Muon)


@ranks(2)
def test_copies_and_pickles() -> None:
    """Copied with its model it trains on, apart from the first; a pickle is refused, for it would hold no shards."""
    _, twin = pair()
    ours = ShardedOptimizer(named(twin), Adagrad)
    torch.optim.lr_scheduler.StepLR(ours, 1)
    train(twin, ours, batches(2))
    other, copied = copy.deepcopy((twin, ours))
    before = {name: whole(p).clone() for name, p in named(twin).items()}
    data = batches(1, seed=9)
    train(other, copied, data)
    assert all(torch.equal(whole(p), before[name]) for name, p in named(twin).items())
    train(twin, ours, data)
    assert_same(other, sharded_to_plain(twin))
    with pytest.raises(errors.OptimizerError, match="cannot be pickled"):
        pickle.dumps(ours)


def sharded_to_plain(twin: Any) -> Any:
    """The values of a sharded model in a plain one."""
    plain = model()
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(whole(twin.get_parameter(name)))
    return plain


@ranks(4)
def test_parameters_on_a_sub_group() -> None:
    """Trained beside those of all ranks, elementwise and whole; a rank outside the group takes part in the rest."""
    group = dist.new_group([0, 2])
    values = torch.arange(12.0, dtype=torch.float64).reshape(4, 3) + 1
    for kind in (AdamW, torch.optim.Adafactor):
        some = shard_tensor(values, chunks(0, 0, 2), process_group=group).requires_grad_()
        everywhere = ReplicatedShardingSpec(places(0, 1, 2, 3))
        all_ = shard_tensor(values, chunks(1, 0, 1, 3)).requires_grad_()
        bias = shard_tensor(values[0].clone(), everywhere).requires_grad_()
        ours = ShardedOptimizer({"some": some, "all": all_, "bias": bias}, kind, lr=0.1)
        plains = [one.clone().requires_grad_() for one in (values, values, values[0])]
        theirs = kind(plains, lr=0.1)
        for _ in range(2):
            for one in (some, all_, bias):
                if one is not some or dist.get_rank() in (0, 2):
                    one.grad = one.detach() * 2
            for one in plains:
                one.grad = one.detach() * 2
            ours.step()
            theirs.step()
        for one, plain in zip((all_, bias), plains[1:], strict=True):
            assert_close(whole(one), plain.detach())
        if dist.get_rank() in (0, 2):
            assert_close(whole(some), plains[0].detach())
        assert ours.state_dict()["state"]["some"].keys() == ours.state_dict()["state"]["all"].keys()


@ranks(2)
def test_ranks_that_do_not_step_alike_are_found_where_they_meet() -> None:
    """One skips a step, or steps another optimizer; nothing is sent for it, and all go on afterwards."""
    plain, twin = pair()
    ours, other = (ShardedOptimizer(named(twin), kind, lr=0.1) for kind in (SGD, AdamW))
    rank = dist.get_rank()
    for steps, said in (
        ([ours] if rank else [], "rank 0 .* check .*test_use.*rank 1 .* step .*test_use"),
        ([ours if rank else other], "in step .*test_use.*: optimizer_class=AdamW on rank 0, optimizer_class=SGD on"),
    ):
        loss_of(twin, batches(1)[0]).backward()
        with trace() as t:
            for one in steps:
                one.step()
        assert not t.events
        with pytest.raises(errors.RankMismatchError, match=said):
            check()
    SGD(plain.parameters(), lr=0.1).step()  # of plain parameters: each rank's own affair
    if rank:
        ShardedOptimizer(named(plain), SGD, lr=0.1).step()
    ours.step()
    check()
