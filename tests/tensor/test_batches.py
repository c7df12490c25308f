"""`join`: batches of ranks that have different numbers of them, down to none; all samples are trained on."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from statistics import LinearRegression
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import assert_close, assert_holds, chunks
from tests.comm.disagreement.given import impatient
from torch import nn
from torch.nn import functional

import shardwise
from shardwise.errors import RankMismatchError
from shardwise.testing import ranks

WORLD = 3
COUNTS: tuple[list[int], ...] = ([4, 3, 2], [5], [])  # rows of each batch, by rank: the last one has none at all


FORMS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], tuple[Any, Any]]]] = {
    "tuple": (lambda x, y: (x, y), lambda batch: batch),
    "list": (lambda x, y: [x, y], lambda batch: batch),
    "named tuple": (LinearRegression, lambda batch: (batch.slope, batch.intercept)),  # any that can be imported
    "dict": (lambda x, y: {"x": x, "more": {"y": y}}, lambda batch: (batch["x"], batch["more"]["y"])),
    "dict with a default": (lambda x, y: defaultdict(list, x=x, y=y), lambda batch: (batch["x"], batch["y"])),
    "ordered dict": (lambda x, y: OrderedDict(x=x, y=y), lambda batch: (batch["x"], batch["y"])),
    "tensor": (lambda x, y: torch.cat([x, y[:, None]], 1), lambda batch: (batch[:, :6], batch[:, 6])),
}


def data(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of a rank."""
    generator = torch.Generator().manual_seed(rank)
    draw = [torch.rand(rows, 7, generator=generator, dtype=torch.float64) for rows in COUNTS[rank]]
    return [(one[:, :6], one[:, 6]) for one in draw]


def steps() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of all ranks, as one process would have them."""
    every = [data(rank) for rank in range(WORLD)]
    longest = max(map(len, every))
    at_each = [[batches[k] for batches in every if k < len(batches)] for k in range(longest)]
    return [(torch.cat([x for x, _ in each]), torch.cat([y for _, y in each])) for each in at_each]


@pytest.mark.parametrize("form", FORMS)
@ranks(WORLD)
def test_all_samples_are_trained_on(form: str) -> None:
    """Two epochs, with a rank that has no batch at all: losses, gradients and weights are those of one process."""
    made, taken = FORMS[form]
    plain = nn.Linear(6, 1, dtype=torch.float64)
    model = nn.Linear(6, 1, dtype=torch.float64)
    model.load_state_dict(plain.state_dict())
    shardwise.shard_module(model, {"weight": chunks(1, 0, 1, 2)})
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (plain, model)]
    batches = shardwise.join([made(*each) for each in data(dist.get_rank())])
    for _ in range(2):
        seen = 0
        for batch, (whole_x, whole_y) in zip(batches, steps(), strict=True):
            x, y = taken(batch)
            assert_holds(x, whole_x)
            assert x.dtype == torch.float64
            losses = []
            for one, optimizer, (inputs, targets) in zip(
                (plain, model), optimizers, ((whole_x, whole_y), (x, y)), strict=True
            ):
                optimizer.zero_grad()
                loss = functional.mse_loss(one(inputs)[:, 0], targets)
                loss.backward()
                losses.append(loss.detach())
                assert_close(model.weight.grad.full_tensor() if one is model else plain.weight.grad, plain.weight.grad)
                optimizer.step()
            assert_close(torch.tensor(losses[1].item(), dtype=torch.float64), losses[0])
            seen += x.shape[0]
        assert seen == sum(map(sum, COUNTS))
    assert_close(model.weight.full_tensor().detach(), plain.weight.detach())


@ranks(WORLD)
def test_what_is_no_tensor() -> None:
    """Values come from the first rank that has a batch; other things are each rank's own."""
    rank = dist.get_rank()
    mine = [
        {
            "x": torch.ones(2, 3, dtype=torch.int32),
            "step": k,
            "scale": torch.tensor(0.5),
            "names": ["a"],
            "more": object,
        }
        for k in range(len(COUNTS[rank]))
    ]
    found = list(shardwise.join(mine))
    assert [batch["step"] for batch in found] == [0, 1, 2]
    assert [batch["x"].shape[0] for batch in found] == [4, 2, 2]
    for k, batch in enumerate(found):
        has = k < len(mine)
        assert batch["x"].dtype == torch.int32
        assert torch.equal(batch["scale"], torch.tensor(0.5))
        assert batch["names"] == (["a"] if has else [])
        assert batch["more"] is (object if has else None)


@ranks(4)
def test_batches_of_a_group_and_of_a_mesh() -> None:
    """Of some ranks; and along one axis of a mesh, where ranks along the other have the same."""
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        found = list(shardwise.join([torch.ones(2, 1)] * (dist.get_rank() // 2), process_group=group))
        assert [tuple(one.shape) for one in found] == [(2, 1)]
    mesh = dist.init_device_mesh("cpu", (2, 2))
    row = dist.get_rank() // 2
    found = list(shardwise.join([torch.full((2, 3), float(row))] * (1 + row), (0, None), mesh=mesh))
    assert [tuple(one.shape) for one in found] == [(4, 3), (2, 3)]
    assert torch.equal(found[1].full_tensor(), torch.ones(2, 3))


@ranks(WORLD)
def test_one_message_for_each_batch() -> None:
    """Whatever it holds; another one where a rank must learn what batches look like."""
    with shardwise.trace() as traced:
        for _ in shardwise.join([{"x": torch.ones(2, 3), "y": torch.ones(2)}] * 3):
            pass
    assert len(traced.events) == 4


@ranks(WORLD)
def test_batches_that_do_not_fit_together() -> None:
    """Are an error on all ranks, which names the part and two ranks; then all go on."""
    rank = dist.get_rank()
    wrong: list[tuple[list[Any], str]] = [
        ([{"x": torch.ones(2, 3 + rank)}], r"batch\['x'\] must have the same size along dim 1.*\[2, 3\] on rank 0"),
        ([{"x": torch.ones(2)} if rank else {"y": torch.ones(2)}], r"batch\['y'\] is a tensor of 1 dims.*rank 0.*'x'"),
        (
            [torch.ones(2, dtype=torch.int32 if rank == 1 else torch.float32)] * (rank < 2),
            "torch.int32, on cpu on rank 1",
        ),
    ]
    for batches, says in wrong:
        with pytest.raises(RankMismatchError, match=says):
            list(shardwise.join(batches))
        shardwise.check()


def failing() -> Iterator[torch.Tensor]:
    """A loader that fails on one rank at its second batch."""
    yield torch.ones(2, 1)
    if dist.get_rank() == 1:
        raise OSError("no such file")
    yield torch.ones(2, 1)


@ranks(WORLD)
def test_a_loader_that_fails_on_one_rank() -> None:
    """Fails on all."""
    with pytest.raises(OSError, match="no such file"):
        list(shardwise.join(failing()))
    shardwise.check()


def leaves(how: str, at: int) -> int:
    """How many batches a rank has seen when it leaves its loop."""
    seen = 0
    for batch in shardwise.join([torch.ones(2, 1)] * 4):
        seen += 1
        batch.sum(0)
        if seen == at and how == "break":
            break
        if seen == at and how == "return":
            return seen
        if seen == at and how == "raise":
            raise KeyError("of this rank alone")
    return seen


@pytest.mark.parametrize("how", ["break", "return", "raise"])
@ranks(WORLD)
def test_a_rank_that_leaves_the_loop_alone(how: str) -> None:
    """Is found by those that wait for it, although it calls nothing any more; then all go on."""
    alone = dist.get_rank() == 1
    with impatient():
        if alone and how == "raise":
            with pytest.raises(KeyError):
                leaves(how, 2)
        elif alone:
            assert leaves(how, 2) == 2
        else:
            with pytest.raises(RankMismatchError, match=r"left its loop over shardwise.join after batch 2.*\n.*rank 1"):
                leaves("", 0)
        shardwise.check()
    assert leaves("", 0) == 4


@pytest.mark.parametrize("how", ["break", "return", "raise"])
@ranks(WORLD)
def test_all_ranks_may_leave_the_loop(how: str) -> None:
    """At the same batch, without an error."""
    for _ in range(2):
        if how == "raise":
            with pytest.raises(KeyError):
                leaves(how, 2)
        else:
            assert leaves(how, 2) == 2
    assert leaves("", 0) == 4


@ranks(WORLD)
def test_an_error_that_one_rank_has_told_is_the_one_that_all_raise() -> None:
    """In an op in the loop: that all leave the loop for it is no second error."""
    bad = 99 if dist.get_rank() == 1 else 0

    def steps() -> None:
        for batch in shardwise.join([torch.ones(2, 2)] * 3):
            torch.gather(batch, 1, shardwise.from_local(torch.full((2, 1), bad)))
            batch.sum(0).full_tensor()

    with impatient():
        with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
            steps()
        shardwise.check()
    assert leaves("", 0) == 4


@ranks(WORLD)
def test_what_is_sharded_already_stays_as_it_is() -> None:
    """In front of a tensor that is joined; a rank without a batch gets nothing for it."""
    whole = shardwise.ones(0, 4, 2)
    batches = [(whole, torch.ones(2, 3, dtype=torch.float64))] if dist.get_rank() else []
    ((kept, joined),) = shardwise.join(batches)
    assert kept is (whole if dist.get_rank() else None)
    assert_holds(joined, torch.ones(4, 3, dtype=torch.float64))
