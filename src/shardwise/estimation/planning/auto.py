"""`auto`: the fastest way to train a model on given devices that fits their memory, and why it is that one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.errors import PlanError, ShardwiseError
from shardwise.estimation.devices import Devices, devices_of, kinds_of, machines
from shardwise.estimation.devices.device import Device
from shardwise.estimation.estimate import Estimate
from shardwise.estimation.planning.candidate import (
    FULLY_SHARDED,
    MIXED,
    PLAIN,
    REPLICATED,
    TENSOR_PARALLEL,
    Candidate,
    set_up,
)
from shardwise.estimation.planning.probes import Costs, Probes
from shardwise.estimation.planning.shares import Shares, best_shares, least_seconds
from shardwise.estimation.planning.shortened_steps import estimated
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
            fullest = one.fullest(range(len(one.needed)))
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
        for device, ranks in kinds_of(self.devices).items():
            rank = chosen.fullest(ranks)
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
    return AutoPlan(told, search.bound, search.work, search.devices, search.rejected)


def best_of(fitting: Sequence[Candidate]) -> tuple[Candidate, str]:
    """The fastest of candidates that fit, or one that is alike and leaves more memory free; and why."""
    fastest = min(fitting, key=lambda one: one.seconds)
    best = min((one for one in fitting if one.seconds <= (1 + TIME_TOLERANCE) * fastest.seconds), key=_memory_fraction)
    if _memory_fraction(best) == _memory_fraction(fastest):
        return fastest, "the fastest that fits"
    return best, f"{best.seconds / fastest.seconds - 1:.1%} slower than {fastest.name}, but leaves more memory free"


def _memory_fraction(one: Candidate) -> float:
    """The part of its memory that the fullest device needs."""
    return one.fullness(one.fullest(range(len(one.needed))))


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
        self._bounds: list[float] = []  # of each way that can be
        self._plain: dict[bool, float] = {}

    def starts(self, recompute: bool | None) -> Iterator[Candidate]:
        """All ways, without shares: ranks with whole layers first, for their activations have to fit somewhere."""
        for row in _row_sizes(self.devices):
            rows = len(self.devices) // row
            for again in (False, True) if recompute is None else (recompute,):
                kinds = [TENSOR_PARALLEL if rows == 1 else MIXED] if row > 1 else [FULLY_SHARDED, REPLICATED]
                for kind in kinds if len(self.devices) > 1 else [REPLICATED]:
                    yield Candidate(kind, row, (1,) * rows, None, again)

    @property
    def bound(self) -> float:
        """Seconds that no plan of these kinds can beat."""
        return min(self._bounds)

    def _bound_of_any(self, recompute: bool) -> float:
        """Seconds that no plan can beat, however it shards the model: all have the kernels of the model itself."""
        if recompute not in self._plain:
            plain = Candidate(PLAIN, 1, (1,) * len(self.devices), None, recompute)
            self._plain[recompute] = least_seconds(self._plain_probes(plain).costs(), self.work.samples)
        return self._plain[recompute]

    def _plain_probes(self, plain: Candidate) -> Probes:
        """Of the model as it is, which tell whether it runs with fewer blocks, too."""
        try:
            return Probes(self.work, plain, self.devices, machines(self.devices))
        except Exception:  # a forward that counts on all its blocks may fail in any way
            whole = replace(self.work, runs_shortened=False)
            if self.work.probed == whole.probed:
                raise
            self.work = whole
            return self._plain_probes(plain)

    def look_at(self, start: Candidate) -> None:
        """Find the best shares of one way, unless it cannot be, or cannot matter."""
        bound = self._bound_of_any(start.recompute)
        if why := self._cannot_be(start):
            self.rejected[start.name] = why
        elif why := self._gains_nothing(bound):
            self.rejected[start.name] = why
            self._bounds.append(bound)
        else:
            try:
                self._judge(start)
            except ShardwiseError as error:
                self.rejected[start.name] = str(error).splitlines()[0]

    def _judge(self, start: Candidate) -> None:
        """Predict a way with its best shares."""
        probes = Probes(self.work, start, self.devices, machines(self.devices))
        costs = probes.costs()
        shares = _best_shares(start, costs, self.devices, self.work.samples)
        if shares is None:
            raise PlanError("the solver found no shares of samples and states")
        candidate = _judged(start, shares, probes, costs, self.devices)
        if not probes.hold_for(candidate.samples):
            candidate = estimated(candidate, self.work, self.devices)
        # Predicted times are those of steps of few blocks: they may be below what the bound counts of all.
        bound = least_seconds(costs, self.work.samples)
        self.judged.append((replace(candidate, seconds=max(candidate.seconds, bound)), costs))
        self._bounds.append(bound)

    @property
    def _best(self) -> Candidate | None:
        return min((one for one, _ in self.judged if one.fits), key=lambda one: one.seconds, default=None)

    def _gains_nothing(self, bound: float) -> str:
        """Why a way with this bound is not looked at; empty if it may be faster than those that are known."""
        best = self._best
        if best is None or best.seconds > bound * (1 + NEAR):
            return ""
        more = best.seconds / bound - 1
        return f"it cannot be faster than {best.name}" + (f" by more than {more:.0%}" if more >= LEAST_TOLD else "")

    def _cannot_be(self, start: Candidate) -> str:
        """Why a way cannot be; empty if it may."""
        rows, samples = len(start.samples), self.work.samples
        if start.kind == MIXED and samples < rows:
            return f"each of {rows} rows of ranks that share layers needs a sample, and the batch has {samples}"
        for one, costs in self.judged:
            if start.kind == REPLICATED and one.kind == FULLY_SHARDED:
                states, least = costs[0].states, min(device.memory for device in self.devices)
                if states > least:
                    return f"parameters, gradients and states alone need {bytes_text(int(states))} on each rank"
            if self._best is not None and one.kind == FULLY_SHARDED and one.recompute == start.recompute:
                memory, there = costs[0].memory, sum(one.memory)
                needed = memory.of(samples) - memory.of(0)
                if needed > there:  # of samples on ranks that share layers, each has a part at best
                    return f"activations alone need {bytes_text(int(needed))}, and all ranks have {bytes_text(there)}"
        return ""


def _row_sizes(devices: Sequence[Device]) -> list[int]:
    """How many ranks may share a layer: one alone; or two, four and so on, as many as are equal and in one machine."""
    places, found, size = machines(devices), [1], 2
    while size <= len(devices):
        rows = [range(first, first + size) for first in range(0, len(devices), size)]
        fits = len(devices) % size == 0
        if fits and all(len({(places[rank], devices[rank]) for rank in row}) == 1 for row in rows):
            found.append(size)
        size *= 2
    return found


def _best_shares(start: Candidate, costs: Sequence[Costs], devices: Sequence[Device], samples: int) -> Shares | None:
    """The best shares of one way, for so many samples."""
    memory = [device.memory for device in devices[:: start.row]]
    # Layers that ranks share are computed by all rows where a row has hardly any samples, which takes other transfers
    # than those that are known.
    fewest = -(-samples // (LEAST_SHARE * len(costs))) if start.kind == MIXED else 0
    return best_shares(costs, memory, samples, shared=start.kind in (FULLY_SHARDED, MIXED), fewest=fewest)


def _judged(
    start: Candidate, shares: Shares, probes: Probes, costs: Sequence[Costs], devices: Sequence[Device]
) -> Candidate:
    """The candidate with its shares, and what comes of them."""
    each = zip(costs, shares.samples, shares.weights, strict=True)
    needed = [int(cost.used(count, weight)) for cost, count, weight in each]
    by_rank = tuple(needed[rank // start.row] for rank in range(len(devices)))
    weights = shares.weights if start.kind in (FULLY_SHARDED, MIXED) else None
    seconds = probes.seconds(shares.samples, shares.weights)  # rows that are not alike wait at every transfer
    found = replace(start, samples=shares.samples, weights=weights, seconds=seconds)
    found = replace(found, needed=by_rank, memory=tuple(device.memory for device in devices))
    return replace(found, fits=not found.lacking)


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
    fewer = max((_most_samples(one, costs, devices, work.samples) for one, costs in search.judged), default=0)
    if fewer:
        changes.append(f"a batch of {fewer} samples instead of {work.samples}")
    changes.append(f"{bytes_text(lacking)} more memory on each device like it, or more devices")
    return (
        f"nothing fits these devices: {nearest.name} comes nearest, and there rank {rank} ({devices[rank].name}) lacks "
        f"{bytes_text(lacking)} of the {bytes_text(nearest.needed[rank])} that it needs; what would fit: "
        + ", or ".join(changes)
        + ("; activations need less with recompute=True" if recompute is False else "")
    )


def _most_samples(candidate: Candidate, costs: Sequence[Costs], devices: Sequence[Device], samples: int) -> int:
    """The largest batch that fits, found by halving."""
    low, high = 0, samples
    while high - low > 1:
        middle = (low + high) // 2
        found = _best_shares(candidate, costs, devices, middle)
        low, high = (middle, high) if found is not None and found.lacking <= 0 else (low, middle)
    return low


# In words -------------------------------------------------------------------------------------------------------------


def _runs(values: Sequence[Any]) -> str:
    """``3 × 2, 1``."""
    found: list[list[Any]] = []
    for value in values:
        if found and found[-1][1] == value:
            found[-1][0] += 1
        else:
            found.append([1, value])
    return ", ".join(f"{count} × {value}" if count > 1 else str(value) for count, value in found)
