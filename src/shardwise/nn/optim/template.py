"""The state that an optimizer keeps for a parameter, found by one step of a new optimizer on zeros."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwise.nn.optim.state import Entry

New = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]  # an optimizer of the same class, for other groups
Shape = tuple[int, ...] | None  # None: any

FIRST_DIMS = tuple(range(2, 34))  # all different, so that a size of state shows which dim it belongs to


def first_state(new: New, options: Mapping[str, Any], like: torch.Tensor) -> Entry:
    """The state before the first step for a parameter like this: that of a step on zeros, with counters reset."""
    leaf = torch.zeros_like(like, requires_grad=True)  # of its class: it may be a DTensor
    optimizer = new([{**options, "params": [leaf]}])
    sparse = isinstance(optimizer, torch.optim.SparseAdam)
    leaf.grad = empty_sparse(leaf) if sparse else torch.zeros_like(leaf)
    with torch.random.fork_rng([leaf.device] if leaf.is_cuda else []):  # an optimizer may draw numbers
        step_without_hooks(optimizer)
    entry: Entry = dict(optimizer.state.get(leaf, {}))
    starts = {"step": 0, "mu_product": 1, "eta": float(options.get("lr", 0))}
    for key, start in starts.items():
        if isinstance(entry.get(key), torch.Tensor):
            entry[key].fill_(start)
        elif key in entry:
            entry[key] = start
    return entry


class Shapes:
    """The expected shapes of state, by key, () for numbers; tried once for each ndim and dtype in a group."""

    def __init__(self, new: New) -> None:
        self._new = new
        self._tried: dict[Any, Entry | None] = {}

    def of(self, parameter: torch.Tensor, group: int, options: Mapping[str, Any]) -> dict[str, Shape] | None:
        """The shapes for a parameter of the group of this number and options; None if the optimizer cannot be tried."""
        small, kind = FIRST_DIMS[: parameter.ndim], (group, parameter.ndim, parameter.dtype)
        if kind not in self._tried:
            self._tried[kind] = self._try(torch.empty(small, dtype=parameter.dtype), options)
        entry = self._tried[kind]
        return None if entry is None else {key: _shape(value, small, parameter) for key, value in entry.items()}

    def _try(self, like: torch.Tensor, options: Mapping[str, Any]) -> Entry | None:
        try:
            return first_state(self._new, options, like)
        except Exception:  # the optimizer refuses so small a parameter: shapes are not checked
            return None


def _shape(value: Any, small: tuple[int, ...], parameter: torch.Tensor) -> Shape:
    if not isinstance(value, torch.Tensor):
        return () if isinstance(value, bool | int | float) else None
    if value.ndim not in (0, parameter.ndim):
        return None
    shape = [
        size if dim == one else 1 if dim == 1 else None
        for dim, one, size in zip(value.shape, small, parameter.shape, strict=False)
    ]
    return None if None in shape else tuple(dim for dim in shape if dim is not None)


def step_without_hooks(optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """A step without torch's hooks, which run in the optimizer of the caller."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    return step(optimizer) if closure is None else step(optimizer, closure)


def empty_sparse(like: torch.Tensor) -> torch.Tensor:
    """A sparse gradient of no rows."""
    rows = torch.empty((1, 0), dtype=torch.int64, device=like.device)
    values = torch.empty((0, *like.shape[1:]), dtype=like.dtype, device=like.device)
    return torch.sparse_coo_tensor(rows, values, like.shape, check_invariants=False)
