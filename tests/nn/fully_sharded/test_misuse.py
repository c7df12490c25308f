"""What models and loops do that is not usual: it is right, or raises on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.cases import ROUNDING
from tests.nn.fully_sharded.cases import (
    LENGTH,
    WIDTH,
    Block,
    Model,
    assert_same,
    batch_of,
    made,
    mine,
    train,
    twins,
    whole,
)
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.errors import PlanError, PropertyError
from shardwise.testing import ranks

TOLERANCE = 1e-6  # AdamW divides by small numbers


def backward(models: tuple[nn.Module, nn.Module], step: int, samples: tuple[int, ...] = (2, 1)) -> None:
    """Forward and backward of a plain and of a sharded model; the losses are the same."""
    ids, labels = batch_of(step, samples)
    expected = models[0](ids, labels)
    loss = models[1](mine(ids, samples), mine(labels, samples))
    torch.testing.assert_close(whole(loss), expected.detach(), rtol=ROUNDING, atol=0)
    expected.backward()
    loss.backward()


def zero_grad(models: tuple[nn.Module, nn.Module]) -> None:
    """Of both."""
    for model in models:
        model.zero_grad()


@dataclass
class Result:
    """What torch does not look into."""

    x: Any


class Opaque(Block):
    """A layer whose result hides its tensor."""

    def forward(self, x: torch.Tensor) -> Any:
        """In an object."""
        return Result(super().forward(x))


class Opening(Model):
    """A model of such layers."""

    def forward(self, ids: Any, labels: Any = None) -> Any:
        """The loss."""
        x = self.table(ids)
        for block in self.blocks:
            x = block(x).x
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class InPlace(Block):
    """A layer that writes into its argument."""

    def forward(self, x: torch.Tensor) -> Any:
        """And gives it."""
        x = x * 1
        return self._written(x)

    def _written(self, x: torch.Tensor) -> Any:
        x += super().forward(x.detach().clone())
        return x


class WritingModel(Model):
    """A model whose unit writes into what it was given."""

    def forward(self, ids: Any, labels: Any = None) -> Any:
        """Without gradients for the argument."""
        scores = super().forward(ids)
        return scores if labels is None else functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


class Statistics(Block):
    """A layer whose statistics are those of all samples in training."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(LENGTH)

    def forward(self, x: torch.Tensor) -> Any:
        """Before the rest."""
        return super().forward(self.batch_norm(x))


class Counted(Block):
    """A layer that divides by the number of samples."""

    def forward(self, x: torch.Tensor) -> Any:
        """Without a message."""
        return super().forward(x) / x.shape[0]


class Tied(Model):
    """Units that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[1:]:
            block.up.weight = self.blocks[0].up.weight


UNUSUAL: dict[str, Callable[[], nn.Module]] = {
    "opaque results": lambda: Opening(Opaque),
    "writes": lambda: WritingModel(InPlace),
    "tied": Tied,
}


@pytest.mark.parametrize("name", UNUSUAL)
@ranks(2)
def test_unusual_units(name: str) -> None:
    """Their losses and gradients are right."""
    train(*twins(UNUSUAL[name]), (2, 1))


@ranks(2)
def test_units_that_were_local_and_are_not_any_more() -> None:
    """A part of a unit goes over to training."""
    models = twins(lambda: Model(Statistics))
    for step in range(4):
        for model in models:
            for module in model.modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.train(step > 1)
        zero_grad(models)
        backward(models, step)
        assert_same(*models)
    for one, other in zip(models[0].buffers(), models[1].buffers(), strict=True):
        torch.testing.assert_close(whole(other), one, rtol=ROUNDING, atol=ROUNDING)


@ranks(2)
def test_one_rank_with_all_samples_decides_nothing() -> None:
    """A unit that counts samples gives the same there, in whichever way it runs."""
    models = twins(lambda: Model(Counted))
    for step, samples in enumerate([(3, 0), (3, 0), (2, 1), (2, 1)]):
        zero_grad(models)
        backward(models, step, samples)
        assert_same(*models)


@ranks(2)
def test_states_after_steps_with_missing_and_replaced_gradients() -> None:
    """Parameters count their own steps."""
    models = twins()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    for step in range(5):
        backward(models, step)
        for model, optimizer in zip(models, optimizers, strict=True):
            if step == 1:
                model.get_parameter("blocks.0.up.weight").grad = None
            if step == 2:
                for name in ("blocks.1.up.weight", "blocks.1.down.weight"):
                    parameter = model.get_parameter(name)
                    assert parameter.grad is not None
                    parameter.grad = parameter.grad * 0.5
            optimizer.step()
            optimizer.zero_grad()
        assert_same(*models, tolerance=TOLERANCE)
    for plain, sharded in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert optimizers[0].state[plain]["step"] == optimizers[1].state[sharded]["step"]


@ranks(2)
def test_hooks_of_optimizers() -> None:
    """They see all parameters, and gradients before the step."""
    models = twins()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    seen: list[int] = []
    for optimizer in optimizers:

        def clip(one: Any, args: Any, kwargs: Any) -> None:
            nn.utils.clip_grad_norm_(one.param_groups[0]["params"], 0.01)

        optimizer.register_step_pre_hook(clip)
        optimizer.register_step_post_hook(lambda one, args, kwargs: seen.append(len(one.param_groups[0]["params"])))
    for step in range(2):
        zero_grad(models)
        backward(models, step)
        for optimizer in optimizers:
            optimizer.step()
        assert_same(*models, grads=False)
    assert len(set(seen)) == 1


class Failing(Exception):
    """Of a hook."""


@ranks(2)
def test_a_failed_backward_and_gradients_of_inputs() -> None:
    """The next step is right."""
    models = twins()
    ids, _ = batch_of(0, (2, 1))

    def fail(_: Any) -> None:
        raise Failing

    for _ in range(2):
        scores = models[1](mine(ids, (2, 1)))
        scores.register_hook(fail)
        with pytest.raises(Failing):
            scores.sum().backward()
        zero_grad(models)
        backward(models, 1)
        assert_same(*models)
    blocks = [nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).double() for _ in range(2)]
    blocks[1].load_state_dict(blocks[0].state_dict())
    sharded = shardwise.fully_shard(blocks[1])
    x = torch.rand(3, WIDTH, dtype=torch.float64)
    plain = x.clone().requires_grad_()
    ours = mine(x, (2, 1)).requires_grad_()
    for _ in range(2):
        (expected,) = torch.autograd.grad(blocks[0](plain).square().sum(), plain)
        (found,) = torch.autograd.grad(sharded(ours).square().sum(), ours)
        torch.testing.assert_close(whole(found), expected, rtol=ROUNDING, atol=ROUNDING)
        assert all(one.grad is None for one in sharded.parameters())


class Recomputed(Block):
    """A layer that is recomputed within."""

    reentrant = True

    def forward(self, x: torch.Tensor) -> Any:
        """In one of torch's ways."""
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@ranks(2)
def test_recomputation_of_several_forwards(reentrant: bool) -> None:
    """In the first steps, too, in which units go over to local samples."""

    def make() -> nn.Module:
        model = Model(Recomputed)
        for block in model.blocks:
            block.reentrant = reentrant
        return model

    models = twins(make)
    for step in range(2):
        zero_grad(models)
        batches = [batch_of(2 * step + k, (2, 1)) for k in range(2)]
        sum(models[0](*one) for one in batches).backward()
        losses = [models[1](*(mine(each, (2, 1)) for each in one)) for one in batches]
        if not reentrant:  # which warns without gradients
            models[1].eval()
            with torch.no_grad():
                models[1](mine(batches[0][0], (2, 1)))
            models[1].train()
        (losses[0] + losses[1]).backward()
        assert_same(*models)


class Skipping(Model):
    """A model that leaves out units, and layers of one."""

    use = (0, 1, 2)

    def forward(self, ids: Any, labels: Any = None) -> Any:
        """Of some blocks."""
        x = self.table(ids)
        for number in self.use:
            x = self.blocks[number](x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@ranks(2)
def test_accumulation_over_steps_that_skip_units() -> None:
    """The last backward sums all gradients."""
    models: Any = twins(Skipping)
    with made(models[1]).accumulating():
        backward(models, 0)
    for model in models:
        model.use = (0, 2)
    backward(models, 1)
    assert_same(*models)
    for model in models:
        model.use = (0, 1, 2)
    zero_grad(models)
    backward(models, 2)
    assert_same(*models)


class Partly(Block):
    """A layer that does not always use all of its parameters."""

    whole = True

    def forward(self, x: torch.Tensor) -> Any:
        """All, or the first ones."""
        return super().forward(x) if self.whole else self.norm(x) * self.scale


@ranks(2)
def test_parameters_that_are_not_used() -> None:
    """They get no gradient, and no weight decay."""
    models: Any = twins(lambda: Model(Partly))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) for model in models]
    for step in range(4):
        for model, optimizer in zip(models, optimizers, strict=True):
            model.blocks[1].whole = step != 2
            optimizer.zero_grad()
        backward(models, step)
        assert_same(*models)
        for optimizer in optimizers:
            optimizer.step()


@ranks(2)
def test_units_that_are_called_by_themselves() -> None:
    """With the values that parameters have then."""
    models: Any = twins()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    x = torch.rand(3, LENGTH, WIDTH, dtype=torch.float64)
    for step in range(3):
        for number in (0, 2):
            expected = models[0].blocks[number](x)
            found = models[1].blocks[number](mine(x, (2, 1)))
            torch.testing.assert_close(whole(found), expected.detach(), rtol=ROUNDING, atol=ROUNDING)
        zero_grad(models)
        backward(models, step)
        for optimizer in optimizers:
            optimizer.step()


@ranks(2)
def test_what_cannot_be_right_raises() -> None:
    """A step between a forward and its backward, and another dtype."""
    models = twins()
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.1)
    ids, labels = (mine(one, (2, 1)) for one in batch_of(0, (2, 1)))
    first, second = models[1](ids, labels), models[1](ids, labels)
    second.backward()
    optimizer.step()
    with pytest.raises(PropertyError, match="modified by an inplace operation"):
        first.backward()
    models[1].to(torch.float32)
    with pytest.raises(PlanError, match="float32 now"):
        models[1](ids, labels)
