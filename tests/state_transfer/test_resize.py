"""A live training that goes on with other ranks, without the disk."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

import shardwise
from shardwise import ShardedOptimizer
from shardwise.errors import (
    ProcessGroupError,
    RankMismatchError,
    ShardwiseError,
    StateLostError,
    StateMismatchError,
)
from shardwise.testing import ranks

SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "dampening": 0.3}  # the first step differs from all others


def group_of(members: Sequence[int]) -> ProcessGroup | None:
    """A process group of these ranks; None for all. Every rank calls it."""
    return None if len(members) == dist.get_world_size() else dist.new_group(list(members))


class Model(nn.Module):
    """Two layers; a bias that is plain, a buffer, and a weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 5)
        self.unused = nn.Parameter(torch.ones(4, 3))  # never gets a gradient, so that optimizers keep no state for it
        self.tied = self.up.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As it is."""
        self.calls += 1
        made: torch.Tensor = self.down((self.up(x) + x @ self.tied.T).relu())
        return made


def spec(members: Sequence[int], dim: int) -> shardwise.ChunkShardingSpec:
    """Cut along a dim, over these ranks."""
    return shardwise.ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in members])


# Half of the rows on ranks 0 and 2, the other half on ranks 1 and 3.
IN_HALVES = shardwise.GridShardingSpec([None, 0], [["rank:0/cpu", "rank:1/cpu"], ["rank:2/cpu", "rank:3/cpu"]])


def plan_for(members: Sequence[int], how: str) -> dict[str, Any]:
    """Where the weights lie."""
    first = 0 if how == "rows" else 1
    return {
        "up.weight": spec(members, first),
        "up.bias": spec(members[::-1], 0),
        "down.weight": spec(members[1:] or members, 1 - first),
        "unused": spec(members, first),
        "tied": spec(members, first),
    }


def made(members: Sequence[int], how: str, optimizer: Any, seed: int | None, **options: Any) -> dict[str, Any] | None:
    """A training on these ranks, new, without a seed from a model on meta; None on other ranks."""
    group = group_of(members)
    if dist.get_rank() not in members:
        return None
    if seed is None:  # then the shards are all that ever takes memory
        with torch.device("meta"):
            model = Model()
        shardwise.shard_module(model, {**plan_for(members, how), "down.bias": None}, process_group=group)
        shardwise.fill_buffers(model, Model, process_group=group)
    else:
        torch.manual_seed(seed)
        model = Model()
        shardwise.shard_module(model, plan_for(members, how), process_group=group)
    named = dict(model.named_parameters())
    groups = [
        {"params": {name: each for name, each in named.items() if "bias" not in name}},
        {"params": {name: each for name, each in named.items() if "bias" in name}, "lr": 0.02},
    ]
    trained = ShardedOptimizer(groups, optimizer, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(trained, 2, 0.5)
    return {"model": model, "optimizer": trained, "scheduler": scheduler, "step": 0, "seen": [], "rng": None}


def train(state: dict[str, Any], steps: int) -> list[dict[str, torch.Tensor]]:
    """Go on for some steps; gives the gradients of each, whole."""
    found = []
    for _ in range(steps):
        x = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(3, 6) * (state["step"] + 1)
        state["optimizer"].zero_grad()
        state["model"](x).pow(2).mean().backward()
        found.append({n: whole(p.grad) for n, p in state["model"].named_parameters() if p.grad is not None})
        state["optimizer"].step()
        state["scheduler"].step()
        state["step"] += 1
        state["seen"] = [*state["seen"], state["step"]]
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it."""
    return tensor.full_tensor() if isinstance(tensor, shardwise.ShardedTensor) else tensor.clone()


def twin(optimizer: Any, steps: int, **options: Any) -> tuple[Model, list[dict[str, torch.Tensor]]]:
    """The same training in one process, never moved, and its gradients."""
    torch.manual_seed(0)
    model = Model()
    named = list(model.named_parameters())
    groups = [
        {"params": [each for name, each in named if "bias" not in name]},
        {"params": [each for name, each in named if "bias" in name], "lr": 0.02},
    ]
    trained = optimizer(groups, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(trained, 2, 0.5)
    state = {"model": model, "optimizer": trained, "scheduler": scheduler, "step": 0, "seen": []}
    return model, train(state, steps)


def close(found: Sequence[dict[str, torch.Tensor]], expected: Sequence[dict[str, torch.Tensor]], most: float) -> None:
    """Every gradient of every step."""
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=most, atol=most)


ROUTES = [
    ([0, 1, 2, 3], [0, 1], [0, 1, 2, 3]),  # fewer, and again all
    ([0, 1, 2], [3, 2, 1, 0], [3]),
    ([0, 1], [1, 3], [2]),  # others
]


@pytest.mark.parametrize(
    ("optimizer", "options", "most"),
    [
        (torch.optim.SGD, SGD, 1e-12),
        (torch.optim.AdamW, {"lr": 1e-2}, 1e-7),  # it divides a gradient by its own size, and amplifies rounding
        (torch.optim.Adafactor, {"lr": 1e-2}, 1e-7),  # it updates whole parameters, and keeps rows and columns
    ],
)
@ranks(4, timeout=25)
def test_training_goes_on_as_if_it_had_never_moved(optimizer: Any, options: dict[str, Any], most: float) -> None:
    """With fewer ranks, with more, with others, in other layouts: the gradients are those of one process; so are the
    options of each group, the scheduler and the plain values. The old state is as it was."""
    _, expected = twin(optimizer, 6, **options)
    for route in ROUTES if optimizer is torch.optim.SGD else ROUTES[1:2]:
        found: list[Any] = []
        state: Any = None
        for leg, members in enumerate(route):
            new = made(members, "rows" if leg % 2 else "columns", optimizer, None if leg else 0, **options)
            if leg:
                before = [None if state is None else whole_here(state), state and list(state["seen"])]
                moved = shardwise.resize(state, new)
                assert moved is new
                assert before == [None if state is None else whole_here(state), state and state["seen"]]
            state = new
            if state is None:
                found += expected[2 * leg : 2 * leg + 2]
                continue
            assert state["step"] == 2 * leg
            assert state["seen"] == list(range(1, 2 * leg + 1))
            assert state["scheduler"].last_epoch == 2 * leg
            assert [group["lr"] for group in state["optimizer"].param_groups] == pytest.approx(
                [options["lr"] * 0.5**leg, 0.02 * 0.5**leg]
            )
            assert int(state["model"].calls) == 2 * leg
            found += train(state, 2)
            assert not state["optimizer"].state_dict_so_far()["state"]["unused"]
        close(found, expected, most)


def whole_here(state: dict[str, Any]) -> list[list[float]]:
    """What is here of each parameter."""
    return [
        [local.sum().item() for local in each._local_tensors()] if hasattr(each, "_local_tensors") else each.tolist()
        for each in state["model"].parameters()
    ]


@ranks(3, timeout=25)
def test_what_has_not_stepped_yet_moves_too() -> None:
    """Neither the old nor the new one has state; or only the new one has some, which is dropped."""
    _, expected = twin(torch.optim.SGD, 2, **SGD)
    for stepped in (False, True):
        old = made([0, 2], "rows", torch.optim.SGD, 0, **SGD)
        new = made([1, 2], "columns", torch.optim.SGD, 5, **SGD)
        if new is not None and stepped:
            train(new, 1)
        shardwise.resize(old, new)
        if new is not None:
            assert not any(new["optimizer"].state_dict_so_far()["state"].values())
            close(train(new, 2), expected, 1e-12)


@ranks(4, timeout=25)
def test_plain_models_and_values_of_every_kind() -> None:
    """A plain tensor goes to each new rank, and a model that stays where it is may be given twice; torch's optimizers
    get their state; tuples, numbers and bytes are what they were; the state need not be a dict."""
    here = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    if here < 2:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    values: Any = {"a": (1, 2.5, None, float("inf")), "b": [b"x", {"c": 2**70}], "d": True, 3: complex(1, 2)}
    blank: Any = {"a": (0, 0.0, None, 0.0), "b": [], "d": False, 3: 0j}
    generator = torch.Generator().manual_seed(5)
    old = [model, optimizer, values, {"rng": generator.get_state()}] if here < 2 else None
    other = model if here == 1 else nn.Linear(3, 2)  # which rank 1 has in both
    adam = optimizer if here == 1 else torch.optim.Adam(other.parameters())
    new = [other, adam, blank, {"rng": torch.Generator().get_state()}] if here else None
    found = shardwise.resize(old, new)
    sums: list[Any] = [None] * 4
    dist.all_gather_object(sums, None if here == 0 else [other.weight.tolist(), adam.state_dict()["state"][0]["step"]])
    if here == 0:
        assert found is None
        return
    assert found[2] == values
    assert type(found[2]["a"]) is tuple
    assert torch.equal(found[3]["rng"], torch.Generator().manual_seed(5).get_state())
    assert adam.param_groups[0]["lr"] == 0.25
    assert sums[1] == sums[2] == sums[3]
    assert sums[1][1] == 1


@ranks(4, timeout=25)
def test_a_lost_rank_whose_boxes_others_have() -> None:
    """Rank 2 is gone: what it had comes from replicas, optimizer state with it, to ranks of which one is new."""
    here, left = dist.get_rank(), [0, 1, 3]
    survivors = dist.new_group(left)
    four, three = group_of([0, 1, 2, 3]), dist.new_group([1, 3])
    torch.manual_seed(0)
    old_model = shardwise.shard_module(
        nn.Linear(4, 6).double(), {"weight": IN_HALVES, "bias": None}, process_group=four
    )
    old_optimizer = ShardedOptimizer(dict(old_model.named_parameters()), torch.optim.SGD, **SGD)
    for _ in range(2):
        old_optimizer.zero_grad()
        old_model(torch.ones(2, 4, dtype=torch.float64)).pow(2).sum().backward()
        old_optimizer.step()
    weight = whole(old_model.weight)
    momentum = whole(old_optimizer.state_dict()["state"]["weight"]["momentum_buffer"])
    if here == 2:
        return
    new = None
    if here != 0:
        torch.manual_seed(1)
        model = nn.Linear(4, 6).double()
        shardwise.shard_module(model, {"weight": spec([1, 3], 1), "bias": None}, process_group=three)
        new = {"model": model, "optimizer": ShardedOptimizer(dict(model.named_parameters()), torch.optim.SGD, **SGD)}
    old = {"model": old_model, "optimizer": old_optimizer}
    shardwise.resize(old, new, lost=[2], process_group=survivors)
    if new is not None:
        assert torch.equal(whole(new["model"].weight), weight)
        there = new["optimizer"].state_dict()["state"]["weight"]["momentum_buffer"]
        assert torch.equal(whole(there), momentum)
    with pytest.raises(ProcessGroupError, match="'model/weight' has boxes on rank 2, which is not in the group"):
        shardwise.resize(old, new, process_group=survivors)
    with pytest.raises(ProcessGroupError, match="rank 1 is given as lost, and is in the group"):
        shardwise.resize(old, new, lost=[1], process_group=survivors)


@ranks(4, timeout=25)
def test_without_replicas_one_error_says_what_is_lost() -> None:
    """On every rank, the new ones too, and nothing has changed; the checkpoint is the way out."""
    here = dist.get_rank()
    old = made([0, 1, 2], "rows", torch.optim.SGD, 0, **SGD)
    if old is not None:
        train(old, 1)
    three = dist.new_group([0, 1, 3])
    new = made([0, 3], "columns", torch.optim.SGD, 1, **SGD)
    if here == 2:
        return
    before = None if new is None else whole_here(new)
    with pytest.raises(StateLostError) as found:
        shardwise.resize(old, new, lost=[2], process_group=three)
    told = str(found.value)
    assert "of 6 tensors, parts were only on the ranks that are lost" in told
    assert "'model/tied': [8:10, 0:6] of rank 2" in told
    assert "'optimizer/state/tied/momentum_buffer': [8:10, 0:6] of rank 2" in told
    assert "shardwise.load" in told
    assert new is None or (whole_here(new) == before and new["step"] == 0)


@ranks(3, timeout=25)
def test_what_cannot_be_is_told_before_anything_changes() -> None:
    """All ranks raise the same error, and the group still works."""
    here = dist.get_rank()
    weights = shardwise.ones(spec([0, 1], 0), 4, 2, process_group=dist.group.WORLD)

    def refused(error: type[ShardwiseError], match: str, old: Any, new: Any) -> None:
        with pytest.raises(error, match=match) as found:
            shardwise.resize(old, new)
        told: list[Any] = [None] * 3
        dist.all_gather_object(told, str(found.value))
        assert len(set(told)) == 1, told

    old = {"w": weights, "step": 3, "lr": 0.5} if here < 2 else None
    new = {"w": torch.zeros(4, 2), "step": 0, "lr": 0.0}
    refused(StateMismatchError, "every rank gives None for new_state", old, None)
    refused(StateMismatchError, "every rank gives None for old_state", None, new)
    refused(StateMismatchError, "not in the new state: lr", old, {"w": torch.zeros(4, 2), "step": 0} if here else None)
    refused(StateMismatchError, r"missing in the old one: more", old, {**new, "more": 1} if here == 2 else new)
    wrong = {**new, "w": torch.zeros(4, 3)}
    refused(StateMismatchError, r"'w' is of size \(4, 3\) in the new state and \(4, 2\) in the old one", old, wrong)
    half = {**new, "w": torch.zeros(4, 2, dtype=torch.float16)}
    refused(
        StateMismatchError, r"'w' is torch.float16 in the new state and torch.float32 in the old one\n\(", old, half
    )
    other = {**old, "step": here} if old else None
    refused(RankMismatchError, "'step' is int 0 on rank 0, and int 1 on rank 1", other, new)
    sgd = ShardedOptimizer({"w": weights.requires_grad_()}, torch.optim.SGD, lr=0.1)
    other = {**old, "sgd": sgd if here else 0} if old else None
    refused(RankMismatchError, "not as many optimizers on rank 1 as on rank 0", other, new)
    weights.requires_grad_(False)
    plain = {"w": torch.full((4, 2), float(here)), "step": 3, "lr": 0.5} if here < 2 else None
    refused(RankMismatchError, "'w' is a plain tensor, and its content is not the same on rank 1", plain, new)
    memory = torch.zeros(5, 2)
    shared = {"w": memory[:4], "step": 0, "lr": 0.0}
    refused(
        StateMismatchError,
        "'w' of the source and 'w' of the target are in the same memory",
        shared,
        {**new, "w": memory[1:]},
    )
    meta = {**new, "w": torch.zeros(4, 2, device="meta")}
    refused(ShardwiseError, "'w' is a tensor on the meta device", old, meta)
    assert new["step"] == 0
    assert not new["w"].any()
    assert shardwise.resize(old, new)["w"].sum() == 8


def on_four_ranks(rank: int, port: int) -> None:
    """A training with replicas on four ranks, of which one is killed; the others go on."""
    store = dist.TCPStore("127.0.0.1", port, 4, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)

    def made(group: ProcessGroup | None, rows: shardwise.ShardingSpec) -> dict[str, Any]:
        torch.manual_seed(0)
        model = shardwise.shard_module(nn.Linear(4, 6).double(), {"weight": rows}, process_group=group)
        named = dict(model.named_parameters())
        return {"model": model, "optimizer": ShardedOptimizer(named, torch.optim.SGD, **SGD), "step": 0}

    def step(state: dict[str, Any]) -> float:
        state["optimizer"].zero_grad()
        loss = state["model"](torch.ones(2, 4, dtype=torch.float64)).pow(2).sum()
        loss.backward()
        state["optimizer"].step()
        state["step"] += 1
        return float(loss)

    old = made(None, IN_HALVES)
    first = [step(old) for _ in range(2)]
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ShardwiseError, match="rank 2 is gone"):
        shardwise.check()
    left = dist.new_group([0, 1, 3], use_local_synchronization=True)
    new = made(left, spec([3, 1, 0], 1))
    shardwise.resize(old, new, lost=[2], process_group=left)
    twin = made(left, spec([0, 1, 3], 0))
    expected = [step(twin) for _ in range(4)]
    assert [*first, step(new), step(new)] == pytest.approx(expected, rel=1e-12)
    assert new["step"] == 4


def test_a_rank_that_was_killed() -> None:
    """The others find out, make a group without it, and go on with what they have."""
    store = dist.TCPStore("127.0.0.1", 0, 4, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=on_four_ranks, args=(rank, store.port)) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, -signal.SIGKILL, 0]


class Lazy:
    """An object that makes its tensors when it is asked to, and refuses some."""

    def __init__(self, fails: bool = False) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.inner = nn.Linear(1, 1)
        nn.init.ones_(self.inner.weight)
        nn.init.zeros_(self.inner.bias)
        self.fails = fails
        self.given = 0

    def init_state(self) -> None:
        """Make room."""
        self.tensors = {"t": torch.zeros(3)}

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return {**self.tensors, "inner": self.inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it, or not."""
        if self.fails:
            raise ValueError("not this one")
        self.tensors = {"t": state["t"].clone()}
        self.given += 1


@ranks(3, timeout=25)
def test_objects_that_make_room_or_refuse() -> None:
    """Objects in objects, given one after the other on all ranks; if one refuses on one rank, all ranks raise, and the
    objects behind it have not changed."""
    here = dist.get_rank()
    old = None
    if here < 2:
        old = {"a": Lazy(), "b": Lazy()}
        for each in old.values():
            each.tensors = {"t": torch.arange(3.0)}
    for fails in (False, True):
        new = {"a": Lazy(), "b": Lazy(fails and here == 2)} if here else None
        if fails:
            with pytest.raises(ValueError, match="not this one"):
                shardwise.resize(old, new)
        else:
            shardwise.resize(old, new)
        if new is not None:
            assert new["a"].tensors["t"].tolist() == [0, 1, 2]
            assert new["b"].given == (not fails or here == 1)
