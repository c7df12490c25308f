"""One trial of an optimizer: some steps over sharded and plain parameters, beside the plain optimizer."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import shardwise
from benchmarks.coverage.control import Control
from benchmarks.coverage.layouts import Layout, budget, whole
from benchmarks.coverage.optimizers import PLAIN, STEPS, Case
from benchmarks.coverage.trial import Attempt, Judgement, judge_those_who
from benchmarks.coverage.truth import difference

Named = dict[str, Any]


@dataclass(frozen=True)
class Truth:
    """Parameters and state of the plain optimizer after its steps, by name."""

    parameters: Named
    state: dict[str, Named]


def truth_of(case: Case) -> Truth:
    """Run the plain optimizer; raises what it raises."""
    parameters = _named(case, [_leaf(case, one.clone()) for one in case.start])
    optimizer = case.optimizer_class(list(parameters.values()), **case.made_with())
    _train(case, optimizer, parameters, list(case.targets))
    state = {name: dict(optimizer.state.get(one, {})) for name, one in parameters.items()}
    return Truth({name: one.detach() for name, one in parameters.items()}, state)


def _leaf(case: Case, value: Any) -> Any:
    return value.detach() if case.differentiable else nn.Parameter(value)


def _named(case: Case, values: list[Any]) -> Named:
    return {f"p{number}": value for number, value in enumerate(values)}


def _train(case: Case, optimizer: Any, parameters: Named, targets: list[Any]) -> None:
    """Towards the targets, from gradients that need no backward."""

    def closure() -> Any:
        loss = torch.zeros((), dtype=torch.float64, device=targets[0].device)
        with torch.no_grad():
            for number, (one, target) in enumerate(zip(parameters.values(), targets, strict=True)):
                away = one.detach() - target
                loss = loss + (number + 1) * away.pow(2).sum()
                _give(one, 2 * (number + 1) * away, sparse=case.sparse)
        return whole(loss)

    for _ in range(STEPS):
        if case.closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def _give(parameter: Any, gradient: Any, *, sparse: bool) -> None:
    """Set a gradient; a sparse one shard by shard."""
    if not sparse:
        parameter.grad = gradient
    elif isinstance(parameter, shardwise.ShardedTensor):
        if not parameter.local_shards():
            parameter.grad = gradient
        for mine, given in zip(parameter.local_shards(), gradient.local_shards(), strict=True):
            mine.tensor.grad = given.tensor.to_sparse()
    else:
        parameter.grad = gradient.to_sparse()


@dataclass(frozen=True)
class OptimizerTrial:
    """What is tried: a case that is known to work, over parameters in one layout."""

    system: str  # "sharded" for ShardedOptimizer, "direct" for torch's own over the sharded parameters
    case: Case
    truth: Truth
    layout: Layout
    control: Control
    differentiable = True  # what is told as backward is the state

    def forward(self) -> Judgement:
        """Whether the parameters are those of the plain optimizer."""
        return self._judged(of_state=False)

    def backward(self) -> Judgement:
        """Whether the state is."""
        return self._judged(of_state=True)

    def _judged(self, *, of_state: bool) -> Judgement:
        def attempt() -> Attempt:
            parameters, state = self._trained
            return self._compare_state(state) if of_state else self._compare_parameters(parameters)

        return judge_those_who(self.layout.takes_part, attempt, self.control)

    @functools.cached_property
    def _trained(self) -> tuple[Named, dict[str, Named]]:
        case, sharded = self.case, len(self.case.start) - PLAIN
        values, targets = (
            [self.layout.shard(one) if k < sharded else one.clone() for k, one in enumerate(some)]
            for some in (case.start, case.targets)
        )
        parameters = _named(case, [_leaf(case, value) for value in values])
        with budget(self.system):
            if self.system.startswith("sharded"):
                ours = shardwise.ShardedOptimizer(parameters, case.optimizer_class, **case.made_with())
                _train(case, ours, parameters, targets)
                return parameters, ours.state_dict()["state"]
            optimizer = case.optimizer_class(list(parameters.values()), **case.made_with())
            _train(case, optimizer, parameters, targets)
            return parameters, {name: dict(optimizer.state.get(one, {})) for name, one in parameters.items()}

    def _compare_parameters(self, parameters: Named) -> Attempt:
        found, wanted = [whole(one.detach()) for one in parameters.values()], list(self.truth.parameters.values())
        if self.case.rounding and self.system.startswith("direct"):
            told = self._off(found, wanted)
        else:
            told = difference(found, wanted, values=True)
        return Attempt("wrong", told) if told else Attempt("right")

    def _off(self, found: list[Any], wanted: list[Any]) -> str:
        """The same, as a part of how far the parameters moved."""
        for one, other, start in zip(found, wanted, self.case.start, strict=True):
            off, moved = (one - other).abs().max(), (other - start).abs().max()
            if one.shape != other.shape or not off <= self.case.rounding * moved:
                return f"off by {off:.3g} after moving by {moved:.3g}"
        return ""

    def _compare_state(self, state: dict[str, Named]) -> Attempt:
        for name, expected in self.truth.state.items():
            mine = state.get(name, {})
            if sorted(mine) != sorted(expected):
                return Attempt("wrong", f"{name} has state {sorted(mine)} instead of {sorted(expected)}")
            for key in sorted(expected):
                found, wanted = (pytree.tree_leaves(one[key]) for one in (mine, expected))
                exact = not self.case.rounding or not self.system.startswith("direct")
                told = difference([whole(one) for one in found], wanted, values=exact)
                if told:
                    return Attempt("wrong", f"state {key} of {name}: {told}")
        return Attempt("right")
