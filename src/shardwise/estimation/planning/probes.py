"""`Costs`: what a step of all blocks and of any number of samples costs, known from steps of few blocks and samples.

Time and memory grow with the blocks, with the samples, and with both. So four steps of small models, run without data
on two rows of ranks, tell them for all: those of three and of four blocks, with about as many samples as a rank gets,
and with half of them. Fewer blocks tell less: while one computes, another is gathered and a third one is summed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from shardwise.estimation.planning.work import Work
from shardwise.estimation.without_data.rank_run import Job, acting_as
from shardwise.torch_private import FAKE_TENSOR_ERRORS

ROWS, FEW = 2, 3  # of ranks, and of blocks, in a probe
NUMBER = re.compile(r"\d+")
NOTHING: Any = None


@dataclass(frozen=True)
class Line:
    """What something costs on a rank: a part of its own, and a part for each sample."""

    fixed: float
    each: float

    def of(self, samples: float) -> float:
        """For so many samples."""
        return self.fixed + self.each * samples


@dataclass(frozen=True)
class Costs:
    """What a candidate costs on a rank of one device, as lines over its samples."""

    seconds: Line
    computing: Line  # seconds of kernels alone: without transfers, and without waiting for the host
    memory: Line  # bytes, without states, gradients and parameters
    states: float  # bytes of all states, gradients and parameters, of which a row has its share


class Probes:
    """The four steps of a candidate, from which costs on any device are known: two of each shortened model."""

    def __init__(self, work: Work, candidate: Candidate, devices: Sequence[Device], machines: Sequence[int]) -> None:
        self._blocks, self._rows = work.blocks, len(candidate.samples)
        self._few = max(work.samples // (2 * self._rows), 1)  # near to what a rank will have: a host may be the slower
        self._sizes = (FEW, FEW + 1) if self._blocks > FEW else (self._blocks,)
        rows = min(self._rows, ROWS)
        some = replace(candidate, samples=(1,) * rows)
        world = devices[: rows * candidate.row], machines[: rows * candidate.row]
        counts = self._few, 2 * self._few
        self._runs = {
            (blocks, count): run
            for blocks in self._sizes
            for count, run in zip(counts, _runs(work, some, *world, blocks, counts), strict=True)
        }
        self._holders = rows if candidate.kind != REPLICATED else 1  # who have all states together
        dealt = Dealt(rows, self._rows, candidate.row, machines, shares_states=candidate.kind != REPLICATED)
        self._tapes = {shape: dealt.tape(run.tape) for shape, run in self._runs.items()}

    def costs(self, device: Device) -> Costs:
        """On a device."""

        def computing(shape: tuple[int, int]) -> float:
            return sum(one.seconds(device) for one in self._tapes[shape].entries if isinstance(one, Kernel))

        return Costs(
            self._line(self._for_all(lambda shape: simulate([self._tapes[shape]], [device])[0].seconds)),
            self._line(self._for_all(computing)),
            self._line(lambda count: self._peak(count) + device.reserved),
            self._for_all(lambda shape: _held(self._runs[shape]))(self._few) * self._holders,
        )

    def _for_all(self, measure: Callable[[tuple[int, int]], float]) -> Callable[[int], float]:
        """A measure for all blocks, by samples."""

        def found(count: int) -> float:
            first, last = (measure((blocks, count)) for blocks in (self._sizes[0], self._sizes[-1]))
            return first + (last - first) * (self._blocks - self._sizes[0])

        return found

    def _line(self, measure: Callable[[int], float]) -> Line:
        few = measure(self._few)
        slope = max(measure(2 * self._few) - few, 0.0) / self._few
        return Line(max(few - slope * self._few, 0.0), slope)

    def _peak(self, count: int) -> float:
        """The most bytes that are there besides states: of each place in the model, then of all."""
        fewer, more = (_by_place(self._runs[blocks, count]) for blocks in (self._sizes[0], self._sizes[-1]))
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
    machines: Sequence[int]
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
        peers = range(0, self.all * self.row, self.row)
        near = sum(self.machines[rank] == self.machines[0] for rank in peers)
        sent = int(one.sent * factor)
        network = sent // near if near < self.all else 0
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


def _by_place(run: ProbedStep) -> dict[_Place, float]:
    """The most bytes besides parameters, gradients and states, when something is made for equal modules by a line."""
    ledger = run.ledger
    series = ledger.series()
    apart: Any = sum(values for name, values in series.items() if name not in (PARAMETERS, GRADIENTS, STATES))
    found: dict[_Place, float] = {}
    for block in ledger.blocks:
        place = _Place(NUMBER.sub("*", block.module), block.line, block.phase)
        found[place] = max(found.get(place, 0.0), float(np.asarray(apart)[block.born]))
    return found
