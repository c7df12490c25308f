"""`shardwise.compile` over the life of a model: other models, other modules, hooks, options, and second derivatives."""

from __future__ import annotations

import copy
import gc
import io
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import assert_close
from tests.compilation.test_units import Graphs, Pair, assert_same_steps, forwards, twins
from tests.models.twins import assert_same_gradients, whole
from torch import nn
from torch._dynamo import config as dynamo_config

import shardwise
from shardwise import plans
from shardwise.compilation.units.captured_graph import GraphCall
from shardwise.errors import PlainValueError, RankMismatchError, ShardwiseError, UnsupportedOpError
from shardwise.testing import ranks

MODELS = 4  # of one class


def rows(seed: int = 0) -> torch.Tensor:
    """A batch."""
    return torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@ranks(2)
def test_each_model_of_a_class_is_compiled() -> None:
    """Torch compiles few versions of a function, here two, and warns of more; what was compiled for a model goes with
    it."""
    warned: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger("torch._dynamo").addHandler(handler)
    compiled, models = [], []
    for _ in range(MODELS):
        graphs = Graphs.__new__(Graphs)
        graphs.backend, graphs.step, graphs.steps, graphs.sizes = "aot_eager", 0, [], []
        plain, model = twins(Pair, (3, 2))
        with dynamo_config.patch(recompile_limit=2):
            assert_same_steps(plain, shardwise.compile(model, backend=graphs), graphs)
        compiled.append(len(graphs.steps))
        models.append(weakref.ref(model))
        assert [one.refusals for one in forwards(model)] == [(), (), ()]
        del plain, model
    logging.getLogger("torch._dynamo").removeHandler(handler)
    assert compiled[0] > 0
    assert compiled == compiled[:1] * MODELS
    assert warned == []
    gc.collect()
    assert [one() for one in models] == [None] * MODELS
    assert not [one for one in gc.get_objects() if isinstance(one, GraphCall)]


def penalty(model: nn.Module, x: torch.Tensor, seen: list[torch.Tensor]) -> None:
    """The gradients of a penalty on a gradient."""
    model.zero_grad()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    grad.square().sum().backward()
    seen.append(whole(grad).detach())


@ranks(4)
def test_a_penalty_on_gradients() -> None:
    """From the first step on, with a rank without shares: the units of such a model run uncompiled."""
    plain, model = twins(Pair)
    graphs = Graphs()
    shardwise.compile(model, backend=graphs)
    for step in range(3):
        seen: list[torch.Tensor] = []
        for one in (plain, model):
            penalty(one, rows(step).requires_grad_(), seen)
        torch.testing.assert_close(seen[1], seen[0])
        assert_same_gradients(model, plain)
    assert graphs.steps == []


@ranks(4)
def test_a_penalty_that_comes_later() -> None:
    """On every rank an error that says what to do; each of the two ways works."""
    plain, model = twins(Pair)
    graphs = Graphs()
    shardwise.compile(model, backend=graphs)
    assert_same_steps(plain, model, graphs)
    assert graphs.steps
    seen: list[torch.Tensor] = []
    with torch.compiler.set_stance("force_eager"):
        for one in (plain, model):
            penalty(one, rows().requires_grad_(), seen)
    assert_same_gradients(model, plain)
    assert_same_steps(plain, model, graphs)  # compiled, as before
    with pytest.raises(UnsupportedOpError, match="set_stance"):
        penalty(model, rows().requires_grad_(), seen)
    for one in (plain, model):
        penalty(one, rows().requires_grad_(), seen)
    assert_same_gradients(model, plain)
    assert [one.refusals for one in forwards(model)] == [(), (), ()]


@ranks(4)
def test_a_recorded_backward_gets_a_gradient_that_is_expanded() -> None:
    """As of a sum: the same error. Gradients that are recorded, but not differentiated, are those of the plain
    model."""
    plain, model = twins(Pair)
    shardwise.compile(model, backend=(graphs := Graphs()))
    assert_same_steps(plain, model, graphs)
    grads: list[torch.Tensor] = []
    for one in (plain, model):
        x = rows().requires_grad_()
        grads += torch.autograd.grad(one(x).sum(), x, create_graph=True)
    torch.testing.assert_close(whole(grads[1]), grads[0])
    with pytest.raises(UnsupportedOpError, match="set_stance"):
        grads[1].square().sum().backward()


@ranks(2)
def test_two_backwards_of_one_forward() -> None:
    """As for several losses: ``retain_graph=True``."""
    plain, model = twins(Pair, (3, 2))
    graphs = Graphs()
    shardwise.compile(model, backend=graphs)
    for step in range(3):
        for one in (plain, model):
            one.zero_grad()
            found = one(rows(step))
            if step != 1:  # which compiles the graphs of the backward
                found.square().sum().backward(retain_graph=True)
            found.sin().sum().backward()
        assert_same_gradients(model, plain)
    assert graphs.steps


@pytest.mark.parametrize(
    "register",
    [
        nn.Module.register_forward_hook,
        nn.Module.register_forward_pre_hook,
        nn.Module.register_full_backward_hook,
        nn.Module.register_full_backward_pre_hook,
    ],
)
@ranks(2)
def test_hooks_within_units(register: Callable[..., Any]) -> None:
    """Of modules within a compiled unit, added later and removed: each is called, and units are compiled again."""
    plain, model = twins(Pair, (3, 2))
    graphs = Graphs()
    shardwise.compile(model, backend=graphs)
    assert_same_steps(plain, model, graphs)
    compiled, calls = len(graphs.steps), {"plain": 0, "model": 0}

    def count(name: str) -> Callable[..., None]:
        def hook(*_: object) -> None:
            calls[name] += 1

        return hook

    handles = [register(block.fc1, count("plain")) for block in plain.children()]
    handles += [register(block.fc1, count("model")) for block in model.children()]
    assert_same_steps(plain, model, graphs)
    assert calls["model"] == calls["plain"] > 0
    for handle in handles:
        handle.remove()
    before = dict(calls)
    assert_same_steps(plain, model, graphs)
    assert calls == before
    assert len(graphs.steps) == compiled


class Adapted(nn.Module):
    """A layer with an adapter of low rank."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(8, 2).double(), nn.Linear(2, 12).double()

    def forward(self, x: Any) -> Any:
        """The sum of both."""
        return self.base(x) + self.up(self.down(x))


@ranks(4)
def test_modules_and_parameters_that_are_replaced() -> None:
    """Adapters in a compiled model, another layer, another parameter: all are seen, and compiled."""
    plain, model = twins(Pair)
    graphs = Graphs()
    shardwise.compile(model, backend=graphs)
    assert_same_steps(plain, model, graphs)
    for number, (theirs, ours) in enumerate(zip(plain.children(), model.children(), strict=True)):
        for block in (theirs, ours):
            torch.manual_seed(number)
            adapted, other, weight = Adapted(block.fc1), nn.LayerNorm(8).double(), torch.randn(8, 12).double()
            if block is ours:
                shardwise.shard_module(adapted.down, plans.rows(adapted.down))
                shardwise.shard_module(adapted.up, plans.rows(adapted.up))
                weight = shardwise.shard(weight, 0)
            block.fc1, block.norm, block.fc2.weight = adapted, other, nn.Parameter(weight)
    compiled = len(graphs.steps)
    assert_same_steps(plain, model, graphs)
    assert [one.refusals for one in forwards(model)] == [(), (), ()]
    assert len(graphs.steps) > compiled


@ranks(2)
def test_compiling_anew_takes_the_new_options() -> None:
    """What the first call has compiled is not used any more."""
    plain, model = twins(Pair, (3, 2))
    first, second = Graphs(), Graphs()
    assert_same_steps(plain, shardwise.compile(model, backend=first), first)
    compiled = len(first.steps)
    assert_same_steps(plain, shardwise.compile(model, backend=second), second)
    assert len(second.steps) == compiled == len(first.steps) > 0


@pytest.mark.parametrize("way", ["fully sharded", "tensor parallel"])
@ranks(2)
def test_forwards_that_are_wrapped(way: str) -> None:
    """Wrappers have the same code, and each calls the forward of its own module."""

    def wrap(module: nn.Module) -> None:
        inner = module.forward
        module.forward = lambda x: inner(x) + 1  # as libraries do

    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]).double()
    model: Any = copy.deepcopy(plain)
    for one in (*plain, *model):
        wrap(one)
    if way == "fully sharded":
        shardwise.fully_shard(model)
    else:
        shardwise.shard_module(model, plans.rows(model))
    shardwise.compile(model, backend="aot_eager")
    x = torch.randn(5, 8, dtype=torch.float64)
    mine = shardwise.from_local(x.split([3, 2])[dist.get_rank()], sizes=[3, 2]) if way == "fully sharded" else x
    for _ in range(3):
        for run, batch in ((plain, x), (model, mine)):
            run.zero_grad()
            run(batch).square().mean().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(whole(one.grad), other.grad)


@ranks(2)
def test_uncompiled_by_the_stance_of_torch() -> None:
    """A unit runs as it is under `torch.compiler.set_stance("force_eager")`, and is compiled later."""
    plain, model = twins(Pair, (3, 2))
    graphs = Graphs()
    shardwise.compile(model, backend=graphs)
    with torch.compiler.set_stance("force_eager"):
        assert_same_steps(plain, model, graphs)
    assert graphs.steps == []
    assert_same_steps(plain, model, graphs)
    assert graphs.steps
    assert [one.refusals for one in forwards(model)] == [(), (), ()]


class Failing(Pair):
    """Raises when it is told to."""

    fails = False

    def forward(self, x: Any) -> Any:
        """Before anything is computed."""
        if self.fails:
            raise ValueError("this forward fails")
        return super().forward(x)


@ranks(4)
def test_a_forward_that_fails_on_one_rank() -> None:
    """All ranks raise, and the next step is right."""
    plain, model = twins(Failing)
    graphs = Graphs()
    shardwise.compile(model, backend=graphs)
    assert_same_steps(plain, model, graphs)
    model[1].fails = dist.get_rank() == 1  # type: ignore[index] # a list of modules
    with pytest.raises((ValueError, ShardwiseError), match="this forward fails"):
        model(rows()).square().mean().backward()
    model[1].fails = False  # type: ignore[index] # a list of modules
    dist.barrier()
    assert_same_steps(plain, model, graphs)


@ranks(3)
def test_sizes_that_only_some_ranks_have_met_in_another_model() -> None:
    """Torch notes for a process which sizes change, by the names of functions: units of a model have names of their
    own."""
    graphs = Graphs("eager")
    group: Any = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        plain, model = twins(Pair, (3, 2), group)
        assert_same_steps(plain, shardwise.compile(model, backend=graphs), graphs, (3, 4, 5))
    plain, model = twins(Pair, (3, 2, 0))
    assert_same_steps(plain, shardwise.compile(model, backend=graphs), graphs)


@ranks(3)
def test_a_size_that_one_rank_alone_has_is_forgotten_after_the_error() -> None:
    """All ranks raise, and the next steps are right."""
    plain, model = twins(Pair, (3, 2, 0))
    shardwise.compile(model, backend=(graphs := Graphs("eager")))
    assert_same_steps(plain, model, graphs)
    with pytest.raises(ShardwiseError):
        model(rows()[: 5 - (dist.get_rank() == 1)]).square().mean().backward()
    dist.barrier()
    assert_same_steps(plain, model, graphs)


class Branching(Pair):
    """Adds a plain number, which it takes before its input or after."""

    offset_first = False

    def __init__(self) -> None:
        super().__init__()
        self.offset = torch.ones((), dtype=torch.float64)

    def forward(self, x: Any) -> Any:
        """The same result either way."""
        return super().forward(self.offset + x if self.offset_first else x + self.offset)


@ranks(2)
def test_graphs_that_differ_between_ranks_are_named() -> None:
    """Plain inputs have other numbers on a rank whose forward takes another branch: their values are the same."""
    plain, model = twins(Branching, (3, 2))
    shardwise.compile(model, backend=(graphs := Graphs("eager")))
    assert_same_steps(plain, model, graphs)
    model[0].offset_first = dist.get_rank() == 1  # type: ignore[index] # a list of modules
    found = r"compiled_unit.* is a plain tensor on rank \d, but not on rank \d; the graphs .* differ between"
    with pytest.raises(RankMismatchError, match=found) as caught:
        model(rows()[:4]).square().mean().backward()
    assert not isinstance(caught.value, PlainValueError)


@ranks(2)
def test_a_saved_model_is_not_compiled() -> None:
    """`torch.save` of a compiled model gives the model as it was, which may be compiled again."""
    plain, model = twins(Pair, (3, 2))
    graphs = Graphs()
    shardwise.compile(model, backend=graphs)
    assert_same_steps(plain, model, graphs)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert forwards(loaded) == []
    compiled = len(graphs.steps)
    assert_same_steps(plain, loaded, graphs)
    assert len(graphs.steps) == compiled
    assert_same_steps(plain, shardwise.compile(loaded, backend=graphs), graphs)
    assert len(graphs.steps) == 2 * compiled
