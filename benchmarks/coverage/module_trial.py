"""One trial of a module: its parameters, its inputs or both in one layout, beside the plain module."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import shardwise
from benchmarks.coverage.control import Control
from benchmarks.coverage.database import seed
from benchmarks.coverage.layouts import Layout, budget, whole
from benchmarks.coverage.modules import Case
from benchmarks.coverage.trial import Attempt, Judgement, judge_those_who
from benchmarks.coverage.truth import difference, digest, waves
from shardwise.ops.autograd.backward import backward

CALLS = 2  # the second is done as it is remembered of the first


@dataclass(frozen=True)
class Gradients:
    """Where a backward starts, and what it must give: for parameters, then for inputs."""

    weights: list[torch.Tensor | None]
    expected: list[torch.Tensor]


@dataclass(frozen=True)
class Truth:
    """What the plain module gives, and its buffers afterwards."""

    outputs: list[Any]
    gradients: Gradients | None
    random: bool


def truth_of(case: Case) -> Truth:
    """Call the plain module; raises what it raises."""
    outputs, other = (_without_graph(case, offset) for offset in (0, 1))
    try:
        gradients = _gradients(case)
    except Exception:  # what has no derivative
        gradients = None
    return Truth(outputs, gradients, random=digest(outputs) != digest(other))


def _without_graph(case: Case, offset: int) -> list[Any]:
    module = case.made()
    seed(offset)
    with torch.no_grad():
        return [*pytree.tree_leaves(case.run(module, case.plain())), *module.buffers()]


def _gradients(case: Case) -> Gradients | None:
    module, arguments = case.made(), case.plain()
    seed()
    outputs = pytree.tree_leaves(case.run(module, arguments))
    flows = [isinstance(out, torch.Tensor) and out.requires_grad for out in outputs]
    if not any(flows):
        return None
    weights = [waves(out.detach()) if flow else None for out, flow in zip(outputs, flows, strict=True)]
    pairs = [(out, weight) for out, weight in zip(outputs, weights, strict=True) if weight is not None]
    torch.autograd.backward([out for out, _ in pairs], [weight for _, weight in pairs])
    leaves = _leaves(case, module, arguments)
    return Gradients(weights, [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])


def _leaves(case: Case, module: nn.Module, arguments: list[Any]) -> list[Any]:
    inputs = [leaf for leaf, wanted in zip(arguments, case.wants_grad, strict=True) if wanted]
    return [*module.parameters(), *inputs]


@dataclass(frozen=True)
class ModuleTrial:
    """What is tried: a case that is known to work, sharded in one layout."""

    system: str
    case: Case
    truth: Truth
    layout: Layout
    what: str  # "parameters", "inputs" or "both": what is sharded
    control: Control

    @property
    def differentiable(self) -> bool:
        """Whether there are gradients to compare."""
        return self.truth.gradients is not None

    def forward(self) -> Judgement:
        """Whether the module gives what the plain one gives, and leaves its buffers alike."""
        return self._judged(backwards=False)

    def backward(self) -> Judgement:
        """Whether the gradients of parameters and inputs are those of the plain module."""
        return self._judged(backwards=True)

    def _judged(self, *, backwards: bool) -> Judgement:
        def attempt() -> Attempt:  # all calls on every rank, whatever they give
            made = [self._backward() if backwards else self._forward() for _ in range(CALLS)]
            return next((one for one in made if one.kind != "right"), made[-1])

        return judge_those_who(self.layout.takes_part, attempt, self.control)

    @functools.cached_property
    def _sharded(self) -> nn.Module:
        module = self.case.made()
        if self.what != "inputs":
            named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.ndim]
            plan: dict[str, Any] = {name: self.layout.spec(parameter.shape) for name, parameter in named}
            shardwise.shard_module(module, shardwise.ShardingPlan(plan), process_group=self.layout.group)
        return module

    def _called(self) -> tuple[nn.Module, list[Any], list[Any]]:
        """A copy of the sharded module, what it is called with, and what it gives."""
        module, arguments = copy.deepcopy(self._sharded), self.case.plain()
        if self.what != "parameters":
            pairs = zip(arguments, self.case.wants_grad, strict=True)
            arguments = [
                self.layout.shard(leaf).requires_grad_(wanted) if isinstance(leaf, torch.Tensor) else leaf
                for leaf, wanted in pairs
            ]
        seed()
        with budget(self.system):
            outputs = pytree.tree_leaves(self.case.run(module, arguments))
        return module, arguments, outputs

    def _forward(self) -> Attempt:
        with torch.no_grad():
            module, _, outputs = self._called()
            return self._compared([*outputs, *module.buffers()], self.truth.outputs, "")

    def _backward(self) -> Attempt:
        gradients = self.truth.gradients
        assert gradients is not None, "only what has a gradient is tried backward"
        module, arguments, outputs = self._called()
        roots, starts = [], []
        for out, weight in zip(outputs, gradients.weights, strict=True):
            if weight is not None:
                sharded = isinstance(out, shardwise.ShardedTensor)
                spec = out.sharding_spec() if sharded else None
                starts.append(
                    weight if spec is None else shardwise.tensor.shard_tensor(weight, spec, 0, out._process_group)
                )
                roots.append(out)
        with budget(self.system):
            backward(roots, starts)
        leaves = _leaves(self.case, module, arguments)
        found = [_zeros(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
        names = [name for name, _ in module.named_parameters()]
        return self._compared(found, gradients.expected, f"gradient of {', '.join(names)} and inputs, ")

    def _compared(self, found: list[Any], expected: list[Any], of: str) -> Attempt:
        wholes = [whole(value) for value in found]
        told = difference(wholes, expected, values=not self.truth.random)
        if told:
            return Attempt("wrong", of + told)
        return Attempt("right", digest=digest(wholes) if self.truth.random else "")


def _zeros(leaf: Any) -> torch.Tensor:
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
