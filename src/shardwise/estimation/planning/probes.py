"""`Costs`: what a step of all blocks and of any number of samples costs, known from steps of few blocks and samples.

Each kernel, each transfer and each allocation grows with the samples, and the step grows with the blocks. So four
steps of small models, run without data on two rows of ranks, tell costs for all: those of three and of four blocks,
with about as many samples as a rank gets, and with half of them. A model that does not run with fewer blocks is
probed with all of them.
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
from shardwise.estimation.planning.candidate import FULLY_SHARDED, MIXED, PLAIN, Candidate, Training
from shardwise.estimation.planning.curve import Curve, Line
from shardwise.estimation.planning.sampled_tape import SampledTape
from shardwise.estimation.planning.work import Work
from shardwise.estimation.without_data.rank_run import Job, acting_as
from shardwise.torch_private import FAKE_TENSOR_ERRORS

ROWS = 2  # of ranks in a probe
ALIGNED = 8  # samples of a probe are a multiple of it, if there are as many: odd numbers may take other kernels
NUMBER = re.compile(r"\d+")
NOTHING: Any = None
NO_BYTES = Line(0.0, 0.0)


@dataclass(frozen=True)
class Costs:
    """What a candidate costs on a rank of one device, by its samples."""

    seconds: Curve  # where all rows have such devices, and as many samples
    computing: Curve  # of kernels alone, but for the optimizer's: without transfers, and without waiting for the host
    memory: Curve  # bytes of the forward and the backward, without states, gradients and parameters
    states: float  # bytes of all states, gradients and parameters, of which a row has its share
    host: float = 0.0  # seconds in which the host starts all kernels, but for the optimizer's
    step: Line = NO_BYTES  # of the optimizer's step besides states, by the share of states that it is of

    def used(self, samples: int, share: float) -> float:
        """The bytes of a row with so many samples and this share of all states."""
        return max(self.memory.of(samples), self.step.of(share)) + self.states * share

    def share_within(self, samples: int, memory: float) -> float:
        """The largest share of all states that fits, beside so many samples."""
        in_backward = (memory - self.memory.of(samples)) / self.states
        in_step = (memory - self.step.fixed) / (self.states + self.step.each)
        return max(min(in_backward, in_step), 0.0)


class Probes:
    """The steps of a candidate from which costs on any device are known: two of each shortened model, or of all."""

    def __init__(self, work: Work, candidate: Candidate, devices: Sequence[Device], machines: Sequence[int]) -> None:
        self._work, self._rows, self._bytes_of_sample = work, len(candidate.samples), work.bytes_of_sample
        few = max(work.samples // (2 * self._rows), 1)  # near to what a rank will have: a host may be the slower
        self._few, self._row = few - few % (ALIGNED if few > ALIGNED else min(few, candidate.row)), candidate.row
        # Costs are worked out for these numbers of samples; a fast device has several times as many as most.
        self._counts = sorted({work.samples, *(min(k * self._few, work.samples) for k in (0, 1, 2, 3, 4, 8))})
        self._sizes = work.probed
        self._probed_rows = rows = min(self._rows, ROWS) if candidate.kind != PLAIN else 1
        some = replace(candidate, samples=(1,) * rows)
        world = devices[: rows * candidate.row], machines[: rows * candidate.row]
        counts = self._few, 2 * self._few
        self._runs = {blocks: _runs(work, some, *world, blocks, counts) for blocks in self._sizes}
        self._shares_states = candidate.kind in (FULLY_SHARDED, MIXED)
        self._holders = rows if self._shares_states else 1  # who have all states together
        firsts = machines[:: candidate.row]
        self._near = [firsts.count(machine) for machine in firsts]
        self._devices = devices[:: candidate.row]
        self._tapes = {}
        for near in dict.fromkeys(self._near):
            dealt = Dealt(rows, self._rows, candidate.row, near)
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

        counts, even = self._counts, 1.0 / self._rows if self._shares_states else 1.0
        return Costs(
            Curve.through(counts, [self._seconds([(device, near, count, even)]) for count in counts]),
            Curve.through(counts, [self._for_all(partial(computing, count)) for count in counts]),
            Curve.through(counts, [peak + device.reserved for peak in self._peaks]),
            self._for_all(lambda blocks: _held(self._runs[blocks][0])) * self._holders,
            self._for_all(lambda blocks: sum(one.calls for one in kernels(self._few, blocks))) * device.call,
            replace(self._step, fixed=self._step.fixed + device.reserved),
        )

    def hold_for(self, samples: Sequence[int]) -> bool:
        """Whether rows with so many samples do what those of the probes did: ranks that share layers cut activations by
        samples, and where some of them have more, transfers depend on the samples of all rows."""
        return all(count % self._row == 0 for count in (self._few, *samples))

    def seconds(self, samples: Sequence[int], shares: Sequence[float]) -> float:
        """Of a step of rows that have so many samples and these shares of all states, and wait for each other."""
        return self._seconds(list(dict.fromkeys(zip(self._devices, self._near, samples, shares, strict=True))))

    def _seconds(self, rows: Sequence[tuple[Device, int, int, float]]) -> float:
        def slowest(blocks: int) -> float:
            tapes = [
                _with_states(self._tapes[blocks, near].of(count), self._holders * share)
                for _, near, count, share in rows
            ]
            return max(one.seconds for one in simulate(tapes, [device for device, *_ in rows]))

        return self._for_all(slowest)

    def _for_all(self, measure: Callable[[int], float]) -> float:
        """A measure for all blocks, of measures for few."""
        return self._work.for_all_blocks(measure(self._sizes[0]), measure(self._sizes[-1]))

    @cached_property
    def _peaks(self) -> list[float]:
        """The most bytes in the forward and the backward besides states, for each number of samples."""
        return [self._peak(count, lambda place: place.phase != STEP) + self._batch for count in self._counts]

    @cached_property
    def _step(self) -> Line:
        """The most bytes in the optimizer's step besides states."""
        return Line(self._batch, max(self._peak(self._few, lambda place: place.phase == STEP), 0.0) * self._holders)

    @property
    def _batch(self) -> float:
        """The bytes of all samples, which each rank has."""
        return self._bytes_of_sample * self._counts[-1]

    def _peak(self, count: int, is_counted: Callable[[_Place], bool]) -> float:
        """The most bytes besides states and the batch at some places: at each for all blocks, then at any."""
        fewer, more = (_between(both, count / self._few - 1) for both in (self._places[0], self._places[-1]))
        for_all = self._work.for_all_blocks
        sizes = (for_all(fewer.get(place, size), size) for place, size in more.items() if is_counted(place))
        return max(sizes, default=0.0) - self._bytes_of_sample * count * self._probed_rows

    @cached_property
    def _places(self) -> list[list[_Sizes]]:
        """For each number of blocks, the sizes at all places for both numbers of samples."""
        return [[_by_place(run) for run in runs] for runs in self._runs.values()]


@dataclass(frozen=True)
class Dealt:
    """How transfers between some rows become transfers between all rows."""

    some: int
    all: int
    row: int
    near: int  # rows in one machine

    def tape(self, tape: Tape) -> Tape:
        """The same for all rows."""
        if self.some == self.all:
            return tape
        made = Tape()
        for entry in tape.entries:
            if isinstance(entry, Sending):
                made.send(self._sending(entry))
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


def _with_states(tape: Tape, times: float) -> Tape:
    """The same for an optimizer that steps so many times the states."""
    entries = [
        replace(one, bytes=int(one.bytes * times)) if isinstance(one, Kernel) and one.is_step else one
        for one in tape.entries
    ]
    return Tape(entries, tape.sendings)


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
        # In the first one optimizers make their states, and units find out in which order they come.
        if not found and even.kind != PLAIN:
            account.begin_step(settles=True)
            step()
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
