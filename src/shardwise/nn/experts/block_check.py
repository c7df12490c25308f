"""`BlockCheck`: whether a module with a list of experts may run on the samples of each rank alone.

When the module is first called in some way, it runs with experts that give back what they get, on this rank's samples,
and on these with as many others behind them. If what it makes of a sample depends on other samples, or if it feeds
experts with results of others, draws numbers or keeps tensors, all ranks raise. Ranks also tell each other what experts
are called with, and where results have the samples, for a rank without samples does not know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed import ProcessGroup

from shardwise.comm.agreement import in_step_sharing
from shardwise.comm.group import Fields
from shardwise.comm.tracing import record
from shardwise.errors import PropertyError
from shardwise.nn.experts.block_samples import BlockSamples, ResultDim, Results
from shardwise.nn.experts.expert_calls import ExpertCall, RowsForm
from shardwise.nn.fully_sharded.local_compute import VALUES, Watch
from shardwise.torch_private import pytree

ONE_BY_ONE = (
    "a module with a list of experts computes on the samples of each rank alone, so it must treat them one by one"
)


class BlockRun(Protocol):
    """A module's own forward on samples, with experts that are asked to give back what they get."""

    def __call__(self, samples: BlockSamples, *, echoes: bool) -> tuple[Any, list[ExpertCall]]:
        """The result, and the calls of experts."""


@dataclass(frozen=True)
class Known:
    """What all ranks know of calls of one kind."""

    form: RowsForm | None  # the arguments of experts; None if no rank has called any
    results: Results


class BlockCheck:
    """What is known of a module, by kinds of calls."""

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], Known] = {}

    def learn(
        self,
        key: tuple[Any, ...],
        group: ProcessGroup,
        samples: BlockSamples,
        output: Any,
        calls: Sequence[ExpertCall],
        module: nn.Module,
        run: BlockRun,
    ) -> Known:
        """What is known of a call of a new kind, or the error that says why it cannot be. Every rank calls it."""

        def work() -> tuple[None, Fields, Any]:
            leaves = pytree.tree_flatten(output)[0]
            for one in leaves:
                if not isinstance(one, (torch.Tensor, *VALUES)):
                    raise PropertyError(f"{ONE_BY_ONE}: its result holds a {type(one).__name__}")
            for call in calls:
                call.require(calls[0].form)
            form = calls[0].form.told() if calls else None
            dims = _checked(module, run, samples, calls) if samples.count else None
            return None, {"verb": "check a module with experts", "results": len(leaves)}, [form, dims]

        told = in_step_sharing(group, work)[1]
        forms, dims = zip(*told, strict=True)
        form, results = (_common(some, what) for some, what in ((forms, "rows for experts"), (dims, "results")))
        made = Known(
            None if form is None else RowsForm.heard(form),
            tuple(None if one is None else ResultDim(*one) for one in results or _assumed(output)),
        )
        if form is not None and results is not None:
            self.known[key] = made
        return made


def _assumed(output: Any) -> list[tuple[int, int] | None]:
    """Where results have samples if no rank has any."""
    return [(0, 0) if isinstance(one, torch.Tensor) else None for one in pytree.tree_flatten(output)[0]]


def _common(told: Sequence[Any], what: str) -> Any:
    """What all ranks that know say."""
    some = [one for one in told if one is not None]
    if any(one != some[0] for one in some):
        raise PropertyError(f"ranks have other {what} of a module with a list of experts: {told!s:.300}")
    return some[0] if some else None


@torch.no_grad()
def _checked(module: nn.Module, run: BlockRun, samples: BlockSamples, calls: Sequence[ExpertCall]) -> list[Any]:
    """Where each result has the samples; or the error."""
    without_values = record.is_forecast()
    before = Watch.of(module, samples.tensors())
    alone, echoed = run(samples, echoes=True)
    if before != Watch.of(module, samples.tensors()):
        raise PropertyError(
            f"{ONE_BY_ONE}, and compute the same twice: it draws random numbers, writes to its arguments, or keeps a "
            "value in a buffer or an attribute. Give such values as results for each sample"
        )
    if not without_values and not _are_same(calls, echoed):
        raise PropertyError("a module with a list of experts calls them with rows that depend on results of others")
    more, _ = run(samples.with_others(_other_values), echoes=True)
    found: list[Any] = []
    for number, (one, other) in enumerate(zip(*(pytree.tree_flatten(x)[0] for x in (alone, more)), strict=True)):
        if not isinstance(one, torch.Tensor):
            found.append(None)
            continue
        grown = [dim for dim, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if a != b]
        where = _result_dim(one, other, grown[0], samples) if len(grown) == 1 else None
        if where is None or not (without_values or _is_close(other.narrow(where[0], 0, one.shape[where[0]]), one)):
            raise PropertyError(
                f"{ONE_BY_ONE}: its result {number}, of size {tuple(one.shape)}, is another with other samples beside"
            )
        found.append(where)
    return found


def _result_dim(one: torch.Tensor, other: torch.Tensor, dim: int, samples: BlockSamples) -> tuple[int, int] | None:
    if other.shape[dim] != 2 * one.shape[dim]:
        return None
    for merged in range(len(samples.trailing)):
        if one.shape[dim] == samples.count * math.prod(samples.trailing[:merged]):
            return dim, merged
    return None


def _other_values(one: torch.Tensor) -> torch.Tensor:
    """Of the same kind, with another sum."""
    return one.roll(1, -1) / 2 if one.is_floating_point() else one


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal but for rounding."""
    if not one.is_floating_point() or not one.numel():
        return torch.equal(one, other)
    rounding = torch.finfo(one.dtype).eps ** 0.5
    return torch.allclose(one, other, rtol=rounding, atol=rounding * float(other.abs().max()), equal_nan=True)


def _are_same(calls: Sequence[ExpertCall], others: Sequence[ExpertCall]) -> bool:
    return len(calls) == len(others) and all(
        one.expert == other.expert and all(map(torch.equal, one.given, other.given))
        for one, other in zip(calls, others, strict=True)
    )
