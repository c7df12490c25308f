"""`Costs`: what a step of all blocks and of any number of samples costs, known from steps of few blocks and samples.

Each kernel, each transfer and each allocation grows with the samples, and the step grows with the blocks. So four
steps of small models, run without data on two rows of ranks, tell costs for all: those of three and of four blocks,
with about as many samples as a rank gets, and with half of them. Fewer blocks tell less: while one computes, another
is gathered and a third one is summed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from shardwise.errors import EstimateError
from shardwise.estimation.account.accounting import Accounting
from shardwise.estimation.account.ledger import GRADIENTS, PARAMETERS, STATES, STEP, Ledger
from shardwise.estimation.account.tape import Kernel, Sending, Tape
from shardwise.estimation.account.timeline import simulate
from shardwise.estimation.devices.device import Device
from shardwise.estimation.explanation import stopped_text
from shardwise.estimation.planning.candidate import REPLICATED, Candidate, Training
from shardwise.estimation.planning.curve import Curve
from shardwise.estimation.planning.sampled_tape import SampledTape
from shardwise.estimation.planning.work import Work
from shardwise.estimation.without_data.rank_run import Job, acting_as
from shardwise.torch_private import FAKE_TENSOR_ERRORS

ROWS, FEW = 2, 3  # of ranks, and of blocks, in a probe
ALIGNED = 8  # samples of a probe are a multiple of it, if there are as many: odd numbers may take other kernels
NUMBER = re.compile(r"\d+")
NOTHING: Any = None


@dataclass(frozen=True)
class Costs:
    """What a candidate costs on a rank of one device, by its samples."""

    seconds: Curve  # where all rows have such devices, and as many samples
    computing: Curve  # of kernels alone, but for the optimizer's: without transfers, and without waiting for the host
    memory: Curve  # bytes, without states, gradients and parameters
    states: float  # bytes of all states, gradients and parameters, of which a row has its share
    host: float = 0.0  # seconds in which the host starts all kernels, but for the optimizer's


class Probes:
    """The four steps of a candidate, from which costs on any device are known: two of each shortened model."""

    def __init__(self, work: Work, candidate: Candidate, devices: Sequence[Device], machines: Sequence[int]) -> None:
        self._blocks, self._rows, self._bytes_of_sample = work.blocks, len(candidate.samples), work.bytes_of_sample
        few = max(work.samples // (2 * self._rows), 1)  # near to what a rank will have: a host may be the slower
        self._few = few - few % ALIGNED if few > ALIGNED else few
        # Costs are worked out for these numbers of samples; a fast device has several times as many as most.
        self._counts = sorted({work.samples, *(min(k * self._few, work.samples) for k in (0, 1, 2, 3, 4, 8))})
        self._sizes = (FEW, FEW + 1) if self._blocks > FEW else (self._blocks,)
        rows = min(self._rows, ROWS)
        some = replace(candidate, samples=(1,) * rows)
        world = devices[: rows * candidate.row], machines[: rows * candidate.row]
        counts = self._few, 2 * self._few
        self._runs = {blocks: _runs(work, some, *world, blocks, counts) for blocks in self._sizes}
        self._holders = rows if candidate.kind != REPLICATED else 1  # who have all states together
        firsts = machines[:: candidate.row]
        self._near = [firsts.count(machine) for machine in firsts]
        self._devices = devices[:: candidate.row]
        self._tapes = {}
        for near in dict.fromkeys(self._near):
            dealt = Dealt(rows, self._rows, candidate.row, near, shares_states=candidate.kind != REPLICATED)
            for blocks, (one, other) in self._runs.items():
                self._tapes[blocks, near] = SampledTape(dealt.tape(one.tape), dealt.tape(other.tape), self._few)

    def costs(self) -> list[Costs]:
        """Of each row."""
        rows = list(zip(self._devices, self._near, strict=True))
        known = {row: self._costs(*row) for row in dict.fromkeys(rows)}
        return [known[row] for row in rows]

    def _costs(self, device: Device, near: int) -> Costs:
        """On a device in a machine that has so many rows."""

        def kernels(count: int, blocks: int) -> list[Kernel]:
            entries = self._tapes[blocks, near].of(count).entries
            return [one for one in entries if isinstance(one, Kernel) and not one.is_step]

        def computing(count: int, blocks: int) -> float:
            return sum(one.seconds(device) for one in kernels(count, blocks))

        counts = self._counts
        return Costs(
            Curve.through(counts, [self._seconds([(device, near, count)]) for count in counts]),
            Curve.through(counts, [self._for_all(partial(computing, count)) for count in counts]),
            Curve.through(counts, [peak + device.reserved for peak in self._peaks]),
            self._for_all(lambda blocks: _held(self._runs[blocks][0])) * self._holders,
            self._for_all(lambda blocks: sum(one.calls for one in kernels(self._few, blocks))) * device.call,
        )

    def seconds(self, samples: Sequence[int]) -> float:
        """Of a step of rows that have so many samples, and wait for each other."""
        return self._seconds(list(dict.fromkeys(zip(self._devices, self._near, samples, strict=True))))

    def _seconds(self, rows: Sequence[tuple[Device, int, int]]) -> float:
        def slowest(blocks: int) -> float:
            tapes = [self._tapes[blocks, near].of(count) for _, near, count in rows]
            return max(one.seconds for one in simulate(tapes, [device for device, *_ in rows]))

        return self._for_all(slowest)

    def _for_all(self, measure: Callable[[int], float]) -> float:
        """A measure for all blocks, of measures for few."""
        first, last = (measure(blocks) for blocks in (self._sizes[0], self._sizes[-1]))
        return first + (last - first) * (self._blocks - self._sizes[0])

    @cached_property
    def _peaks(self) -> list[float]:
        """The most bytes that are there besides states, for each number of samples."""
        fewer, more = ([_by_place(run) for run in self._runs[blocks]] for blocks in (self._sizes[0], self._sizes[-1]))
        found = []
        for count in self._counts:
            ratio = count / self._few - 1
            whole = self._bytes_of_sample * (self._counts[-1] - count * min(self._rows, ROWS))  # which each rank has
            found.append(self._peak(_between(fewer, ratio), _between(more, ratio)) + whole)
        return found

    def _peak(self, fewer: _Sizes, more: _Sizes) -> float:
        """The same for the sizes of fewer and of more blocks: of each place in the model, then of all."""
        further = self._blocks - self._sizes[-1]
        dealt = self._holders / self._rows if self._holders > 1 else 1.0  # of states, as an optimizer steps them
        return max(
            (size + (size - fewer.get(place, size)) * further) * (dealt if place.phase == STEP else 1.0)
            for place, size in more.items()
        )


@dataclass(frozen=True)
class Dealt:
    """How what some rows do becomes what all rows do: transfers between rows, and the step on a row's states."""

    some: int
    all: int
    row: int
    near: int  # rows in one machine
    shares_states: bool  # whether each row has a part of the states

    def tape(self, tape: Tape) -> Tape:
        """The same for all rows."""
        if self.some == self.all:
            return tape
        made = Tape()
        for entry in tape.entries:
            if isinstance(entry, Sending):
                made.send(self._sending(entry))
            elif isinstance(entry, Kernel) and entry.is_step and self.shares_states:
                made.entries.append(replace(entry, bytes=entry.bytes * self.some // self.all))
            else:
                made.entries.append(entry)
        return made

    def _sending(self, one: Sending) -> Sending:
        if all(rank < self.row for rank in one.to):  # within a row
            return one
        factor = ((self.all - 1) / self.all) / ((self.some - 1) / self.some)
        sent = int(one.sent * factor)
        network = sent // self.near if self.near < self.all else 0
        return replace(one, sent=sent, received=int(one.received * factor), to={}, network=network)


class ProbedStep(NamedTuple):
    """What the first rank does in one step, and the memory that it has meanwhile."""

    tape: Tape
    ledger: Ledger


def _runs(
    work: Work,
    candidate: Candidate,
    devices: Sequence[Device],
    machines: Sequence[int],
    blocks: int,
    counts: Sequence[int],
) -> list[ProbedStep]:
    """Steps of a shortened model, as the first rank, of rows that have equal samples and states: one for each number of
    samples."""
    even = replace(candidate, weights=None)
    with work.shortened(blocks):
        job = Job(Training, (work.model, even, replace(work, model=NOTHING)), {}, devices, machines)
        with acting_as(0, job) as (account, (train, args, _)):
            try:
                with account.setting_up():
                    training = train(*args)
                return _steps(account, training, even, counts)
            except FAKE_TENSOR_ERRORS as error:
                raise EstimateError(stopped_text(error)) from error


def _steps(account: Accounting, training: Training, even: Candidate, counts: Sequence[int]) -> list[ProbedStep]:
    found: list[ProbedStep] = []
    for count in counts:
        step = training.step_on(tuple(count for _ in even.samples))
        if not found:
            step()  # in the first one optimizers make their states, and units find out in which order they come
        account.begin_step()
        step()
        found.append(ProbedStep(account.tape, account.ledger))
        account.begin_step()  # what is made for the next one is not of this one
    return found


def _held(run: ProbedStep) -> float:
    """Bytes of parameters, gradients and states of this rank: gradients are as large as parameters."""
    series = run.ledger.series()
    return float(2 * series[PARAMETERS].max() + series[STATES].max())


class _Place(NamedTuple):
    """Where memory is allocated, the same for equal modules."""

    module: str
    line: str
    phase: str


_Sizes = Mapping[_Place, float]


def _by_place(run: ProbedStep) -> _Sizes:
    """The most bytes besides parameters, gradients and states, when something is made for equal modules by a line."""
    ledger = run.ledger
    series = ledger.series()
    apart: Any = sum(values for name, values in series.items() if name not in (PARAMETERS, GRADIENTS, STATES))
    found: dict[_Place, float] = {}
    for block in ledger.blocks:
        place = _Place(NUMBER.sub("*", block.module), block.line, block.phase)
        found[place] = max(found.get(place, 0.0), float(np.asarray(apart)[block.born]))
    return found


def _between(both: Sequence[_Sizes], ratio: float) -> _Sizes:
    """Sizes between two, or beyond: the first ones have the ratio 0, the second ones 1."""
    few, more = both
    return {place: few.get(place, size) + (size - few.get(place, size)) * ratio for place, size in more.items()}
