"""Torch's own database of optimizers, as a source of configurations to try."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from benchmarks.coverage.database import seed, stand_in_for_expecttest

DTYPE = torch.float64
SIZES = ((6, 5), (7,), (4, 3, 2), (3, 4), ())  # of the parameters; the last two stay plain
PLAIN = 2
MATRICES = ((6, 5), (4, 7), (5, 3), (3, 4), (2, 2))  # for optimizers of matrices
STEPS = 4
ITERATIONS = 3  # of an optimizer that asks a closure again and again within one step
ROUNDING = {"Muon": 0.2}  # which computes in bfloat16; as a part of how far parameters move


@dataclass(frozen=True)
class Case:
    """An optimizer with its options, and the parameters that it is tried on."""

    optimizer_class: type[torch.optim.Optimizer]
    options: dict[str, Any]
    told: str
    start: list[torch.Tensor]
    targets: list[torch.Tensor]
    closure: bool  # whether a step wants one
    sparse: bool  # whether it wants sparse gradients
    rounding: float = 0.0  # how far a parameter may be off, as a part of how far it moves, beyond what dtypes say

    def made_with(self) -> dict[str, Any]:
        """Its options, copied, since an optimizer may change a tensor among them."""
        return copy.deepcopy(self.options)

    @property
    def differentiable(self) -> bool:
        """Whether steps are recorded, so that a leaf that requires grad cannot be changed by them."""
        return bool(self.options.get("differentiable"))

    def __str__(self) -> str:
        return self.told


@functools.cache
def optimizers() -> dict[str, Any]:
    """Every entry of the database by its name."""
    stand_in_for_expecttest()
    from torch.testing._internal.common_optimizers import optim_db

    return {vars(info)["optim_cls"].__name__: info for info in optim_db}  # whose declared type is another


def names(patterns: list[str]) -> list[str]:
    """The names that fit a pattern; all when there is no pattern."""
    return [name for name in optimizers() if not patterns or any(fnmatchcase(name, one) for one in patterns)]


def cases(name: str, device: str) -> list[Case]:
    """Every configuration of an optimizer, each with the implementations that it has; the same on every rank."""
    info = optimizers()[name]
    sizes = MATRICES if name == "Muon" else SIZES
    seed()
    start = [torch.randn(size, dtype=DTYPE) for size in sizes]
    targets = [torch.randn(size, dtype=DTYPE) for size in sizes]
    found = []
    for given in info.optim_inputs_func(device):
        for told, options in _implementations(info, given, device):
            wants = {"closure": info.step_requires_closure, "sparse": info.only_supports_sparse_grads}
            if info.step_requires_closure:
                options = {**options, "max_iter": ITERATIONS}
            tensors = [[one.to(device) for one in some] for some in (start, targets)]
            rounding = ROUNDING.get(name, 0.0)
            found.append(Case(info.optim_cls, options, told, tensors[0], tensors[1], **wants, rounding=rounding))
    return found


def _implementations(info: Any, given: Any, device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    flags = [flag for flag in info.supported_impls if flag != "fused" or device in info.supports_fused_on]
    plain = {**given.kwargs, **dict.fromkeys(flags, False)}
    yield given.desc or "default", plain
    for flag in flags:
        yield f"{given.desc or 'default'}, {flag}", {**plain, flag: True}
