"""Torch's own database of modules, as a source of calls to try."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks.coverage.database import NoCases, copied, is_dense, seed, spread, stand_in_for_expecttest

DTYPE = torch.float64


@dataclass(frozen=True)
class Case:
    """A module and what it is called with, as a flat list."""

    module: nn.Module  # never called itself
    arguments: list[Any]
    tree: pytree.TreeSpec
    wants_grad: list[bool]  # by argument
    told: str

    def run(self, module: nn.Module, arguments: list[Any]) -> Any:
        """Call a module like this one with these in place of its own arguments."""
        args, kwargs = pytree.tree_unflatten(arguments, self.tree)
        return module(*args, **kwargs)

    def made(self) -> nn.Module:
        """A copy of the module."""
        return copy.deepcopy(self.module)

    def plain(self) -> list[Any]:
        """Copies of its own arguments."""
        pairs = zip(self.arguments, self.wants_grad, strict=True)
        return [copied(leaf).requires_grad_(wanted) if is_dense(leaf) else leaf for leaf, wanted in pairs]

    def __str__(self) -> str:
        return self.told


@functools.cache
def modules() -> dict[str, Any]:
    """Every entry of the database by its name."""
    stand_in_for_expecttest()
    from torch.testing._internal.common_modules import module_db

    return {info.name: info for info in module_db}


def names(patterns: list[str]) -> list[str]:
    """The names that fit a pattern, with or without `nn.`; all when there is no pattern."""
    fitting = [
        name
        for name in modules()
        if any(fnmatchcase(name, pattern) or fnmatchcase(name, f"nn.{pattern}") for pattern in patterns)
    ]
    return fitting if patterns else list(modules())


def cases(name: str, most: int, device: str) -> list[Case]:
    """At most so many calls of a module, spread over all that the database has; the same on every rank."""
    info = modules()[name]
    if DTYPE not in info.dtypes:
        raise NoCases(f"not for {DTYPE}")
    found = []
    for training in (True, False) if info.train_and_eval_differ else (True,):
        seed()
        for number, given in enumerate(info.module_inputs_func(info, device, DTYPE, True, training)):
            if given.forward_input is not None:
                found.append((training, number, given))
    return list(_cases(info, device, spread(found, most)))


def _cases(info: Any, device: str, found: Iterator[tuple[bool, int, Any]]) -> Iterator[Case]:
    for training, number, given in found:
        seed()
        made = given.constructor_input
        module = info.module_cls(*made.args, **made.kwargs).to(device).to(DTYPE).train(training)
        leaves, tree = pytree.tree_flatten((given.forward_input.args, given.forward_input.kwargs))
        if info.is_lazy:  # its parameters are made by a first call
            args, kwargs = pytree.tree_unflatten(leaves, tree)
            module(*args, **kwargs)
        how = ", ".join([*map(_told, made.args), *(f"{key}={_told(value)}" for key, value in made.kwargs.items())])
        sizes = ", ".join(_told(leaf) for leaf in leaves)
        yield Case(
            module,
            [copied(leaf) if is_dense(leaf) else leaf for leaf in leaves],
            tree,
            [is_dense(leaf) and leaf.requires_grad for leaf in leaves],
            f"{info.name[3:]}({how})({sizes}){'' if training else ' in eval'} #{number}"[:200],
        )


def _told(value: Any) -> str:
    return f"{str(value.dtype)[6:]}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:40]
