"""`auto`: the fastest way to train a model on given devices that fits their memory, and why it is that one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.errors import PlanError, ShardwiseError
from shardwise.estimation.devices import Devices, devices_of, machines
from shardwise.estimation.devices.device import Device
from shardwise.estimation.estimate import Estimate
from shardwise.estimation.planning.candidate import (
    FULLY_SHARDED,
    MIXED,
    REPLICATED,
    TENSOR_PARALLEL,
    Candidate,
    set_up,
)
from shardwise.estimation.planning.probes import Costs, Probes
from shardwise.estimation.planning.shares import Shares, best_shares, least_seconds
from shardwise.estimation.planning.work import Work, work_of
from shardwise.estimation.without_data.rank_run import Job, rank_runs
from shardwise.estimation.without_data.stand_ins import restoring_state
from shardwise.layout.pictures.words import bytes_text, ranks_text
from shardwise.report import PlanRow, Report, notebook, save_page

TIME_TOLERANCE = 0.05  # predicted times that differ by no more do not tell which plan is faster
LEAST_SHARE = 8  # a row of ranks that share layers has at least an even share of the samples, divided by this
NEAR = 0.1  # how near to the bound a plan must be, for no other one to be looked at
LEAST_TOLD = 0.005  # what is printed as 0%


@dataclass(frozen=True)
class AutoPlan:
    """The ways to train a model on some devices, the best one first. Printed, it says which one and why.

    ``chosen.apply(model)`` shards the model, and ``chosen.cut(batch)`` gives each rank its samples.
    """

    candidates: list[Candidate]
    bound: float  # seconds that no plan of these kinds can beat
    work: Work
    devices: tuple[Device, ...]
    rejected: dict[str, str]  # ways that cannot be, by name, and why

    @property
    def chosen(self) -> Candidate:
        """The fastest one that fits; of those that are alike, the one that leaves most memory free."""
        return self.candidates[0]

    @property
    def gap(self) -> float:
        """By which part the chosen one is slower than the bound."""
        return self.chosen.seconds / self.bound - 1 if self.bound else 0.0

    def apply(self, model: nn.Module) -> nn.Module:
        """Shard a model in the chosen way, in place. Every rank of the world calls it."""
        return self.chosen.apply(model)

    def cut(self, batch: Any) -> Any:
        """The samples of a batch, which all ranks have, to the ranks that compute them."""
        return self.chosen.cut(batch)

    def estimate(self, candidate: Candidate | None = None) -> Estimate:
        """What a candidate would need, by default the chosen one: of all blocks, and on every rank."""
        return _estimate(self.work, candidate or self.chosen, self.devices)

    def report(self) -> Report:
        """A page of the chosen plan, with all of them compared."""
        return replace(self.estimate().report(), title="the chosen plan", plans=self.plan_rows())

    def plan_rows(self) -> list[PlanRow]:
        """All candidates, and ways that cannot be."""
        rows = []
        for one in self.candidates:
            fullest = max(range(len(one.needed)), key=lambda rank: one.needed[rank] / one.memory[rank])
            needed, memory = one.needed[fullest], one.memory[fullest]
            rows.append(PlanRow(one.name, one.seconds, needed, memory, one.fits, one is self.chosen, one.reason))
        rows += [PlanRow(name, None, None, None, None, False, why) for name, why in self.rejected.items()]
        return rows

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a page of it: one HTML file that needs no other."""
        save_page(self.report(), Path(path))

    def _repr_html_(self) -> str:
        return notebook(self.report())

    def __str__(self) -> str:
        chosen = self.chosen
        lines = [f"chosen: {chosen.name}, {chosen.seconds * 1e3:,.1f} ms a step; {chosen.reason}"]
        lines.append(f"  samples by row of ranks: {_runs(chosen.samples)}")
        if chosen.weights is not None and len(set(chosen.weights)) > 1:
            lines.append(f"  states by row of ranks: {_runs([f'{weight:.1%}' for weight in chosen.weights])}")
        for device, ranks in _by_device(self.devices):
            rank = max(ranks, key=lambda rank: chosen.needed[rank])
            needs = f"{bytes_text(chosen.needed[rank])} of {bytes_text(chosen.memory[rank])}"
            lines.append(f"  {ranks_text(ranks)} ({device}): at most {needs}")
        for one in self.candidates[1:]:
            lines.append(f"rejected: {one.name}, {one.seconds * 1e3:,.1f} ms: {one.reason}")
        lines += [f"left out: {name}: {why}" for name, why in self.rejected.items()]
        lines.append(f"no plan of these kinds takes less than {self.bound * 1e3:,.1f} ms; the gap is {self.gap:.0%}")
        return "\n".join(lines)


def auto(
    model: nn.Module,
    *,
    devices: Devices,
    batch: Any,
    optimizer: str | Callable[[Any], torch.optim.Optimizer] = "adamw",
    precision: str | torch.dtype | None = None,
    recompute: bool | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> AutoPlan:
    """The way to train a model on these devices that is predicted to be the fastest of those that fit.

    Of ways that take at most 5% longer, it is the one that leaves most memory free.

    It compares the model replicated, fully sharded, tensor parallel, and both of the latter together, each with as many
    samples and such a share of the states on every device as makes the step shortest. Nothing is computed, and the
    devices need not be there; the model may be on ``meta``::

        >>> with torch.device("meta"):
        ...     model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)])
        >>> plan = shardwise.plans.auto(model, devices="2xH100-80GB", batch=torch.ones(8, 256))  # print(plan)
        >>> plan.chosen.fits
        True

    ``devices`` are named as for `shardwise.estimate`. ``batch`` is what the model is called with, for all samples: a
    tensor, a tuple or a mapping of tensors; or (samples, tokens) for a language model. ``precision`` is a dtype that
    the parameters are converted to. With ``recompute``, blocks keep their arguments alone for the backward; None
    compares both. ``loss`` gives the loss of what the model gives.
    """
    work = work_of(model, batch, optimizer, loss, precision)
    search = _Search(work, devices_of(devices))
    with restoring_state():
        for start in search.starts(recompute):
            search.look_at(start)
    if not search.judged:
        raise PlanError("no plan can be made: " + "; ".join(f"{name}: {why}" for name, why in search.rejected.items()))
    candidates = [one for one, _ in search.judged]
    if not any(one.fits for one in candidates):
        raise PlanError(_nothing_fits(search, recompute))
    best, why = best_of([one for one in candidates if one.fits])
    others = sorted((one for one in candidates if one is not best), key=lambda one: (not one.fits, one.seconds))
    told = [replace(best, reason=why), *(_compared(one, best) for one in others)]
    return AutoPlan(told, search.bound, work, search.devices, search.rejected)


def best_of(fitting: Sequence[Candidate]) -> tuple[Candidate, str]:
    """The fastest of candidates that fit, or one that is alike and leaves more memory free; and why."""
    fastest = min(fitting, key=lambda one: one.seconds)
    best = min((one for one in fitting if one.seconds <= (1 + TIME_TOLERANCE) * fastest.seconds), key=_memory_fraction)
    if _memory_fraction(best) == _memory_fraction(fastest):
        return fastest, "the fastest that fits"
    return best, f"{best.seconds / fastest.seconds - 1:.1%} slower than {fastest.name}, but leaves more memory free"


def _memory_fraction(one: Candidate) -> float:
    """The part of its memory that the fullest device needs."""
    return max(needed / there for needed, there in zip(one.needed, one.memory, strict=True))


def estimate_candidate(
    model: nn.Module,
    candidate: Candidate,
    *,
    devices: Devices,
    batch: Any,
    optimizer: str | Callable[[Any], torch.optim.Optimizer] = "adamw",
    precision: str | torch.dtype | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> Estimate:
    """What one way to train a model would need, on every rank."""
    work, found = work_of(model, batch, optimizer, loss, precision), devices_of(devices)
    if len(candidate.samples) * candidate.row != len(found):
        raise PlanError(
            f"the plan is for {len(candidate.samples) * candidate.row} ranks, and there are {len(found)} devices"
        )
    return _estimate(work, candidate, found)


def _estimate(work: Work, candidate: Candidate, devices: Sequence[Device]) -> Estimate:
    job = Job(set_up, (work.model, candidate, replace(work, model=nn.Module())), {}, devices, machines(devices))
    return Estimate(candidate.name, rank_runs(job), job)


# Candidates -----------------------------------------------------------------------------------------------------------


class _Search:
    """The ways that were looked at, and those that need not be."""

    def __init__(self, work: Work, devices: tuple[Device, ...]) -> None:
        self.work, self.devices = work, devices
        self.judged: list[tuple[Candidate, list[Costs]]] = []
        self.rejected: dict[str, str] = {}

    def starts(self, recompute: bool | None) -> Iterator[Candidate]:
        """All ways, without shares: ranks with whole layers first, whose work bounds that of ranks which share them."""
        for row in _row_sizes(self.devices):
            rows = len(self.devices) // row
            for again in (False, True) if recompute is None else (recompute,):
                kinds = [TENSOR_PARALLEL if rows == 1 else MIXED] if row > 1 else [FULLY_SHARDED, REPLICATED]
                for kind in kinds if len(self.devices) > 1 else [REPLICATED]:
                    yield Candidate(kind, row, (1,) * rows, None, again)

    @property
    def bound(self) -> float:
        """Seconds that no plan of these kinds can beat."""
        return least_seconds([costs for _, costs in self.judged], self.work.samples)

    def _bound_of(self, start: Candidate) -> float:
        """The same of plans that recompute if this one does: ranks that share layers compute no less together."""
        alike = [costs for one, costs in self.judged if one.recompute >= start.recompute]
        return least_seconds(alike, self.work.samples) if alike else self.bound

    def look_at(self, start: Candidate) -> None:
        """Find the best shares of one way, unless it cannot be, or cannot matter."""
        why = self._needless(start)
        if not why:
            try:
                probes = Probes(self.work, start, self.devices, machines(self.devices))
            except ShardwiseError as error:
                why = str(error).splitlines()[0]
        if why:
            self.rejected[start.name] = why
            return
        shares, costs = _shares(start, probes, self.work, self.devices)
        self.judged.append((_judged(start, shares, costs, self.devices), costs))

    def _needless(self, start: Candidate) -> str:
        """Why a way need not be looked at; empty if it must."""
        best = min((one for one, _ in self.judged if one.fits), key=lambda one: one.seconds, default=None)
        if best is not None and best.seconds <= (bound := self._bound_of(start)) * (1 + NEAR):
            more = best.seconds / bound - 1
            return f"it cannot be faster than {best.name}" + (f" by more than {more:.0%}" if more >= LEAST_TOLD else "")
        for one, costs in self.judged:
            if start.kind == REPLICATED and one.kind == FULLY_SHARDED:
                states, least = costs[0].states, min(device.memory for device in self.devices)
                if states > least:
                    return f"parameters, gradients and states alone need {bytes_text(int(states))} on each rank"
            if best is not None and one.kind == FULLY_SHARDED and one.recompute == start.recompute:
                memory, there = costs[0].memory, sum(one.memory)
                needed = memory.of(self.work.samples) - memory.of(0)
                if needed > there:  # of samples on ranks that share layers, each has a part at best
                    return f"activations alone need {bytes_text(int(needed))}, and all ranks have {bytes_text(there)}"
        return ""


def _row_sizes(devices: Sequence[Device]) -> list[int]:
    """How many ranks may share a layer: one alone, two, or as many as are equal and in one machine."""
    places, found = machines(devices), []
    size = 2
    while size <= len(devices):
        rows = [range(first, first + size) for first in range(0, len(devices), size)]
        fits = len(devices) % size == 0
        if fits and all(len({(places[rank], devices[rank]) for rank in row}) == 1 for row in rows):
            found.append(size)
        size *= 2
    return [1, *dict.fromkeys(found[:1] + found[-1:])]


def _shares(start: Candidate, probes: Probes, work: Work, devices: Sequence[Device]) -> tuple[Shares, list[Costs]]:
    costs, memory = probes.costs(), [device.memory for device in devices[:: start.row]]
    shared = start.kind in (FULLY_SHARDED, MIXED)
    found = best_shares(
        costs,
        memory,
        work.samples,
        shared=shared,
        apart=start.kind != TENSOR_PARALLEL,
        fewest=_fewest(start, work.samples),
    )
    if isfinite(found.seconds):  # rows that are not alike wait for each other at every transfer
        pairs = zip(costs, found.samples, strict=True)
        least = max(max(cost.computing.of(count), cost.host) for cost, count in pairs)  # which the bound counts
        found = replace(found, seconds=max(probes.seconds(found.samples), least))
    return found, costs


def _fewest(start: Candidate, samples: int) -> int:
    """The samples that a row has at least. Layers that ranks share are computed by all rows where a row has hardly any,
    which takes other transfers than those that are known."""
    return samples // (LEAST_SHARE * len(start.samples)) if start.kind == MIXED else 0


def _judged(start: Candidate, shares: Shares, costs: Sequence[Costs], devices: Sequence[Device]) -> Candidate:
    """The candidate with its shares, and what comes of them."""
    each = zip(costs, shares.samples, shares.weights, strict=True)
    needed = [int(cost.memory.of(count) + cost.states * weight) for cost, count, weight in each]
    by_rank = tuple(needed[rank // start.row] for rank in range(len(devices)))
    memory = tuple(device.memory for device in devices)
    fits = all(need <= have for need, have in zip(by_rank, memory, strict=True)) and shares.seconds < float("inf")
    weights = shares.weights if start.kind in (FULLY_SHARDED, MIXED) else None
    return replace(
        start, samples=shares.samples, weights=weights, seconds=shares.seconds, needed=by_rank, memory=memory, fits=fits
    )


def _compared(one: Candidate, best: Candidate) -> Candidate:
    if one.fits:
        but = ", but leaves less memory free" if one.seconds < best.seconds else ""
        return replace(one, reason=f"it fits, and takes {one.seconds / best.seconds:.2f} × as long{but}")
    rank, lacking = max(one.lacking.items(), key=lambda pair: pair[1], default=(0, 0))
    return replace(one, reason=f"rank {rank} lacks {bytes_text(lacking)}")


def _nothing_fits(search: _Search, recompute: bool | None) -> str:
    """Which device lacks how much, and the smallest change that would fit."""
    work, devices, candidates = search.work, search.devices, [one for one, _ in search.judged]
    nearest = min(candidates, key=lambda one: max(one.lacking.values(), default=0))
    rank, lacking = max(nearest.lacking.items(), key=lambda pair: pair[1])
    changes = []
    fewer = max((_most_samples(one, costs, work.samples) for one, costs in search.judged), default=0)
    if fewer:
        changes.append(f"a batch of {fewer} samples instead of {work.samples}")
    changes.append(f"{bytes_text(lacking)} more memory on each device like it, or more devices")
    return (
        f"nothing fits these devices: {nearest.name} comes nearest, and there rank {rank} ({devices[rank].name}) lacks "
        f"{bytes_text(lacking)} of the {bytes_text(nearest.needed[rank])} that it needs; what would fit: "
        + ", or ".join(changes)
        + ("; activations need less with recompute=True" if recompute is False else "")
    )


def _most_samples(candidate: Candidate, costs: Sequence[Costs], samples: int) -> int:
    """The largest batch that fits, found by halving."""
    memory = [candidate.memory[row * candidate.row] for row in range(len(costs))]
    shared, apart = candidate.kind in (FULLY_SHARDED, MIXED), candidate.kind != TENSOR_PARALLEL
    low, high = 0, samples
    while high - low > 1:
        middle = (low + high) // 2
        fewest = _fewest(candidate, middle)
        fits = best_shares(costs, memory, middle, shared=shared, apart=apart, fewest=fewest).lacking <= 0
        low, high = (middle, high) if fits else (low, middle)
    return low


# In words -------------------------------------------------------------------------------------------------------------


def _by_device(devices: Sequence[Device]) -> list[tuple[str, list[int]]]:
    found: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        found.setdefault(device.name, []).append(rank)
    return list(found.items())


def _runs(values: Sequence[Any]) -> str:
    """``3 × 2, 1``."""
    found: list[list[Any]] = []
    for value in values:
        if found and found[-1][1] == value:
            found[-1][0] += 1
        else:
            found.append([1, value])
    return ", ".join(f"{count} × {value}" if count > 1 else str(value) for count, value in found)
