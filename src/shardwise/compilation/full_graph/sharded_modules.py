"""Whether a call has sharded tensors, asked before every call of a function that has had none so far."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any

import torch
from torch import nn

from shardwise.compilation.full_graph.compared_values import is_same
from shardwise.compilation.full_graph.used_values import modules_of_call, unbound
from shardwise.tensor import ShardedTensorBase
from shardwise.torch_private import pytree

PLAIN = {torch.Tensor, nn.Parameter, bool, int, float, str, type(None)}


class UsedModules:
    """The modules of a function. What holds their tensors is looked up once, and again when submodules change."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self._bound = unbound(function)
        self._roots: list[nn.Module] = []
        self._children: list[tuple[dict[str, Any], list[Any]]] = []
        self._holders: list[dict[str, Any]] = []

    def has_sharded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether there is a sharded tensor among these arguments, or in a module that the call uses."""
        args, kwargs = self._bound.joined(args, kwargs)
        leaves: Sequence[Any] = (*args, *kwargs.values())
        if not {type(one) for one in leaves} <= PLAIN:
            leaves = pytree.tree_leaves((args, kwargs))
            if any(isinstance(one, ShardedTensorBase) for one in leaves):
                return True
        roots = modules_of_call(self._function, leaves)
        if not self._is_current(roots):
            modules = [module for root in roots for module in root.modules()]
            self._roots = roots
            self._children = [(module._modules, list(module._modules.values())) for module in modules]
            self._holders = [holder for one in modules for holder in (one._parameters, one._buffers, vars(one))]
        types = {type(one) for holder in self._holders for one in holder.values()}
        return any(issubclass(one, ShardedTensorBase) for one in types - PLAIN)

    def _is_current(self, roots: Sequence[nn.Module]) -> bool:
        return (
            len(roots) == len(self._roots)
            and all(map(operator.is_, roots, self._roots))
            and all(starmap(is_same, self._children))
        )
