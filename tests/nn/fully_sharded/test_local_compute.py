"""Which units run on plain local samples, and that those run on sharded tensors in which samples meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cases import ROUNDING
from tests.nn.fully_sharded.cases import Block, Model, batch_of, made, mine, train, twins, whole
from torch import nn

import shardwise
from shardwise.testing import ranks


class Mixing(Block):
    """A layer in which samples meet."""

    def forward(self, x: torch.Tensor) -> Any:
        """With the mean of all samples."""
        return super().forward(x - x.mean(0))


class Counting(Block):
    """A layer that looks at the number of samples."""

    def forward(self, x: torch.Tensor) -> Any:
        """Without a message."""
        return super().forward(x) / x.shape[0]


class Normed(Block):
    """A layer with statistics of all samples, which it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> Any:
        """In training."""
        return super().forward(self.batch_norm(x))


@pytest.mark.parametrize("block", [Mixing, Counting, Normed])
@ranks(3)
def test_units_in_which_samples_meet_are_right_too(block: type[nn.Module]) -> None:
    """They run on sharded tensors."""
    plain, model = twins(lambda: Model(block))
    train(plain, model, (1, 0, 3))
    for unit in made(model).units[1:]:
        assert set(unit.local._known.values()) == {None}
    for one, other in zip(plain.buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(whole(other), one, rtol=ROUNDING, atol=ROUNDING)


class Leaving(Block):
    """A layer that leaves a tensor in an attribute."""

    def forward(self, x: torch.Tensor) -> Any:
        """For a loss of the model."""
        self.left = super().forward(x).tanh()
        return x + self.left


class Adding(Model):
    """A model that reads what its layers leave."""

    def forward(self, ids: Any, labels: Any = None) -> Any:
        """With a loss of all layers."""
        return super().forward(ids, labels) + sum(block.left.mean() for block in self.blocks)


@ranks(3)
def test_what_a_unit_leaves_in_attributes_is_of_all_samples() -> None:
    """So it runs on sharded tensors."""
    train(*twins(lambda: Adding(Leaving)), (1, 0, 3))


class Switched(Block):
    """A layer in which samples meet from some step on."""

    meets = False

    def forward(self, x: torch.Tensor) -> Any:
        """By an attribute."""
        return super().forward(x - x.mean(0) if self.meets else x)


@ranks(2)
def test_a_unit_that_changes_is_tried_again() -> None:
    """Its attributes are a part of the kind of call."""
    plain, model = twins(lambda: Model(Switched))
    for meets in (False, True):
        for one in (*plain.modules(), *model.modules()):
            if isinstance(one, Switched):
                one.meets = meets
        train(plain, model, (1, 3))


@ranks(2)
def test_hooks_within_a_unit_see_all_samples() -> None:
    """A unit with such hooks runs on sharded tensors."""
    plain, model = twins()
    train(plain, model, (2, 3), steps=2)
    seen: list[Any] = []
    for one in (plain, model):
        one.get_submodule("blocks.1.up").register_forward_hook(lambda *given: seen.append(whole(given[2])))
    train(plain, model, (2, 3), steps=1)
    torch.testing.assert_close(seen[1], seen[0], rtol=ROUNDING, atol=ROUNDING)


class Adapted(Block):
    """A layer that gets another parameter later."""

    def forward(self, x: torch.Tensor) -> Any:
        """With it, if it is there."""
        shift = getattr(self, "shift", None)
        return super().forward(x) if shift is None else super().forward(x) + shift


@pytest.mark.parametrize("compiles", [False, True])
@ranks(2)
def test_a_parameter_that_is_added_later(compiles: bool) -> None:
    """Gets the gradient of all samples, on every rank; frozen ones leave the unit as it is."""
    plain, model = twins(lambda: Model(Adapted))
    if compiles:
        shardwise.compile(model, backend="aot_eager")
    train(plain, model, (1, 3), steps=2)
    for one in (plain, model):
        added = nn.Parameter(torch.ones(6, dtype=torch.float64))
        one.get_submodule("blocks.1").register_parameter("shift", added)
    train(plain, model, (1, 3), steps=3)
    assert {dims is None for unit in made(model).units[1:] for dims in unit.local._known.values()} == {False}
    for one in (plain, model):
        one.get_parameter("blocks.1.shift").requires_grad_(False)
    train(plain, model, (1, 3), steps=2)


class Dropping(Block):
    """A layer with dropout."""

    def forward(self, x: torch.Tensor) -> Any:
        """In training only."""
        return nn.functional.dropout(super().forward(x), 0.4, self.training)


@ranks(2)
def test_dropout_is_that_of_the_whole_batch() -> None:
    """With all ranks seeded alike."""
    plain, model = twins(lambda: Model(Dropping))
    ids, labels = batch_of(0, (2, 3))
    for _ in range(2):
        torch.manual_seed(5)
        expected = plain(ids, labels)
        torch.manual_seed(5)
        loss = model(mine(ids, (2, 3)), mine(labels, (2, 3)))
        torch.testing.assert_close(whole(loss), expected.detach(), rtol=ROUNDING, atol=0)
        loss.backward()
    model.eval()
    plain.eval()
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(whole(model(mine(ids, (2, 3)))), plain(ids), rtol=ROUNDING, atol=ROUNDING)
    assert (0,) in made(model).units[1].local._known.values()
