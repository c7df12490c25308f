"""Batches that ranks read each for itself, as one sharded batch a step, for as long as any rank has one.

Ranks need not have equally many batches, nor rows in them. A rank that has none left takes part with an empty one, so
that no sample is left out and none is counted twice.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.dispatch import Distributed
from shardwise.process_group import in_step_sharing, in_step_telling
from shardwise.sharded_tensor.from_local import from_local

NONE = object()  # instead of a batch


@dataclass(frozen=True)
class Step:
    """One batch of all ranks, and whether it is the last."""

    batch: Any
    is_last: bool


@dataclass(frozen=True)
class _Rows:
    """What an empty tensor must be like to be joined with the tensors of other ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def joint_steps(
    own: Iterator[Any], group: ProcessGroup, *, is_last: Callable[[], bool], device: torch.device | str | None
) -> Iterator[Step]:
    """The batches of all ranks, joined step by step, until no rank has any left.

    Every rank of the group iterates. ``is_last`` says whether this rank's latest batch is its last one: it is not
    asked for more then. A small message travels for each step; what a rank fails with, all ranks raise.
    """
    is_done = False

    def fetch() -> tuple[Any, dict[str, str], list[bool]]:
        batch = NONE if is_done else next(own, NONE)
        return batch, {"verb": "next batch"}, [batch is not NONE, batch is NONE or is_last()]

    while True:
        batch, told = in_step_sharing(group, fetch, subject="a loader's")
        if not any(has_batch for has_batch, _ in told):
            return
        if not all(has_batch for has_batch, _ in told):
            batch = _or_empty(batch, group, device)
        is_done = told[dist.get_rank(group)][1]
        step = Step(joined(batch, group), all(last for _, last in told))
        yield step
        if step.is_last:
            return


def joined(batch: Any, group: ProcessGroup) -> Any:
    """The batch with all plain tensors in it joined with those of the other ranks, along their first dim.

    Numbers, which have none, stay plain: they are the same on every rank.
    """
    return mapped(lambda value: from_local(value, process_group=group) if _has_rows(value) else value, batch)


def first_rows(batch: Any, count: int, whole: int) -> Any:
    """The batch with only so many rows, of all tensors that have as many as the whole batch."""
    return mapped(lambda value: value[:count] if _has_rows(value) and len(value) == whole else value, batch)


def row_count(batch: Any) -> int:
    """The size of the first tensor in a batch along its first dim; 0 without one."""
    return next((int(leaf.shape[0]) for leaf in _leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim), 0)


def _leaves(batch: Any) -> list[Any]:
    found: list[Any] = []
    mapped(found.append, batch)
    return found


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """The same nest of lists, tuples and mappings, with its ends changed; mappings stay of their class."""
    if isinstance(value, list | tuple):
        items = [mapped(change, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if hasattr(value, "keys") and hasattr(value, "items"):
        return type(value)({key: mapped(change, item) for key, item in value.items()})
    return change(value)


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, Distributed) and value.ndim > 0


def _or_empty(batch: Any, group: ProcessGroup, device: torch.device | str | None) -> Any:
    """This rank's batch, or one without rows like that of the first rank which has one."""

    def describe() -> tuple[None, dict[str, str], bytes]:
        described = b"" if batch is NONE else pickle.dumps(mapped(_described, batch))
        return None, {"verb": "last batches"}, described

    _, told = in_step_telling(group, describe, subject="a loader's")
    if batch is not NONE:
        return batch
    found = pickle.loads(next(one for one in told if one))
    return mapped(lambda value: _without_rows(value, device) if isinstance(value, _Rows) else value, found)


def _described(value: Any) -> Any:
    if _has_rows(value):
        return _Rows(tuple(value.shape[1:]), value.dtype)
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _without_rows(rows: _Rows, device: torch.device | str | None) -> torch.Tensor:
    return torch.empty((0, *rows.shape), dtype=rows.dtype, device=device or "cpu")
