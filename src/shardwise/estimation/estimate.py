"""`estimate`: the memory and the time of a step on every rank, without data and without devices."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise import report
from shardwise.errors import EstimateError
from shardwise.estimation.account.timeline import simulate
from shardwise.estimation.devices import Devices, devices_of, machines
from shardwise.estimation.devices.device import Device
from shardwise.estimation.explanation import stopped_text
from shardwise.estimation.fit import Capacities, Fit, fit_of
from shardwise.estimation.model_rows import module_rows
from shardwise.estimation.rank_estimate import RankEstimate
from shardwise.estimation.without_data.rank_run import STEPS, Job, RankRun, rank_runs
from shardwise.layout.pictures.words import bytes_text, ranks_text

SHOWN = 8  # groups of ranks in the printed table


class Estimate:
    """What a step would need on each rank. Printed, a table; in a notebook, the page that `save` writes.

    ``parts`` are the ranks, those that are alike as one. ``peak`` is the most memory that any rank needs, ``seconds``
    the time of the step. ``stopped`` says where values decide what comes next, after which nothing is known; else it is
    empty.
    """

    def __init__(self, name: str, runs: Sequence[tuple[RankRun, Sequence[int]]], job: Job) -> None:
        devices = [job.devices[ranks[0]] for _, ranks in runs]
        timelines = simulate([run.accounting.tape for run, _ in runs], devices)
        self.name, self.world = name, job.ranks
        self.parts = [
            RankEstimate(tuple(ranks), device, run.rank, run.accounting, timeline)
            for (run, ranks), device, timeline in zip(runs, devices, timelines, strict=True)
        ]
        self.stopped = next((stopped_text(run.stopped) for run, _ in runs if run.stopped is not None), "")
        self._models = runs[0][0].models

    @property
    def peak(self) -> int:
        """Bytes that the fullest rank needs."""
        return max(part.peak for part in self.parts)

    @property
    def seconds(self) -> float:
        """How long a step would take."""
        return max(part.seconds for part in self.parts)

    @property
    def flops(self) -> int:
        """Floating point operations of all ranks."""
        return sum(part.flops * len(part.ranks) for part in self.parts)

    @property
    def sent(self) -> int:
        """Bytes that all ranks send."""
        return sum(part.sent * len(part.ranks) for part in self.parts)

    def rank(self, rank: int) -> RankEstimate:
        """What one rank needs."""
        for part in self.parts:
            if rank in part.ranks:
                return part
        raise EstimateError(f"there is no rank {rank}: the estimate is of the ranks 0 to {self.world - 1}")

    def fits(self, memory: Capacities | None = None) -> Fit:
        """Whether every rank has enough memory: true or false, and printed, by how much, and what would help.

        ``memory`` is what ranks have: ``"80 GiB"`` for all, or by rank, as in ``{"rank:0": "80 GiB"}``; ranks that are
        not named have what their devices have.
        """
        if self.stopped:
            raise EstimateError(
                f"whether the step fits is not known, for it was not followed to its end: {self.stopped}"
            )
        return fit_of(self.parts, memory, self.world)

    # Shown -----------------------------------------------------------------------------------------------------------

    @cached_property
    def links(self) -> list[tuple[int, int, int]]:
        """The bytes that each rank sends to each other one: (from, to, bytes)."""
        found: dict[tuple[int, int], int] = {}
        for part in self.parts:
            for rank in part.ranks:
                for peer, size in part.sent_to(rank, self.world).items():
                    found[rank, peer] = found.get((rank, peer), 0) + size
        return [(*pair, size) for pair, size in sorted(found.items())]

    def as_run(self) -> report.Run:
        """The estimate as one run of a report."""
        return report.Run(self.name, self.world, [part.as_part() for part in self.parts], self.links)

    def report(self, *others: Any) -> report.Report:
        """A page of this estimate, and of other estimates or traces beside it."""
        runs = [self.as_run(), *report.as_runs(others)]
        rows = [row for model in self._models for row in module_rows(model)]
        notes = [self.stopped] if self.stopped else []
        return report.Report(self.name, runs, rows, (), notes)

    def save(self, path: str | os.PathLike[str], *others: Any) -> None:
        """Write a page of it: one HTML file that needs no other. Other estimates or traces are shown beside it."""
        report.save_page(self.report(*others), Path(path))

    def _repr_html_(self) -> str:
        return report.notebook(self.report())

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.seconds * 1e3:,.1f} ms, at most {bytes_text(self.peak)} on a rank"]
        for part in self.parts[:SHOWN]:
            lines.append(f"  {ranks_text(part.ranks)} ({part.device.name}): {part}")
        if len(self.parts) > SHOWN:
            lines.append(f"  … and {len(self.parts) - SHOWN} more kinds of ranks")
        return "\n".join([*lines, *filter(None, (self.stopped,))])

    def __repr__(self) -> str:
        return f"<Estimate of {self.world} ranks: {bytes_text(self.peak)}, {self.seconds * 1e3:.1f} ms>"


def estimate(
    step: Callable[..., Any],
    *args: Any,
    ranks: int | None = None,
    devices: Devices | None = None,
    steps: int = STEPS,
    name: str = "predicted",
    **kwargs: Any,
) -> Estimate:
    """What a step would need on every rank: its memory over time, the bytes on each link, its arithmetic, its time.

    Nothing is computed and nothing is sent: the step runs on tensors without data, once for each kind of rank, as if
    this process were that rank. Models may be of any size, and on ``meta``. In a world, real or of the backend
    ``fake``, what the step refers to is copied first and stays as it is::

        >>> model = shardwise.fully_shard(torch.nn.Linear(64, 64))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> batch = shardwise.from_local(torch.ones(4, 64))
        >>> def step():
        ...     model(batch).sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> needs = shardwise.estimate(step, devices="1xH100-80GB")
        >>> bool(needs.fits("80 GiB"))
        True

    With ``ranks``, or more ``devices`` than there are ranks, the world need not be there. Then ``step`` is a function
    that sets everything up as a rank of that world would, and gives the function to be called for a step; where it
    gives none, an error is raised.

    ``devices`` are named as in ``"4xH100-80GB,2xRTX4090"``, or come from a file that ``shardwise doctor --measure``
    has written. The step is called so many ``steps`` times, and the last one is told: in the first ones optimizers
    make their states. Arguments go to the step.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    found = _devices(devices, ranks, world)
    if steps < 1:
        raise EstimateError(f"steps is how often the step is called, at least once; found {steps!r:.80}")
    job = Job(step, args, kwargs, found, machines(found), steps, sets_up=len(found) > world)
    return Estimate(name, rank_runs(job), job)


def _devices(named: Devices | None, ranks: int | None, world: int) -> Sequence[Device]:
    """One for each rank."""
    if ranks is not None and ranks < 1:
        raise EstimateError(f"ranks is the size of the world, at least 1; found {ranks!r:.80}")
    found = devices_of("CPU" if named is None else named)
    count = ranks if ranks is not None else (world if len(found) == 1 else len(found))
    if len(found) not in (1, count):
        raise EstimateError(f"there are {len(found)} devices for {count} ranks: name one for all, or one for each")
    return found if len(found) == count else found * count
