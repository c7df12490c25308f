"""A live training that goes on with other ranks, without the disk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.state_transfer.trainings import SGD, close, made, spec, train, twin, whole_here
from torch import nn

import shardwise
from shardwise import ShardedOptimizer
from shardwise.errors import RankMismatchError, ShardwiseError, StateMismatchError
from shardwise.testing import ranks

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
@ranks(4)
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


@ranks(3)
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


@ranks(4)
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


@ranks(3)
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
    bare = torch.zeros(4, 2)  # a state without a name
    assert shardwise.resize(weights if here < 2 else None, bare) is bare
    assert bare.sum() == 8


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


@ranks(3)
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
