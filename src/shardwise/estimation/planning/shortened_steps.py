"""`estimated`: a candidate with the time and the memory of its own steps, of shortened models.

Where ranks that share layers have other numbers of samples, `Probes` of equal rows do not tell what a step costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from shardwise.estimation.devices import Device, machines
from shardwise.estimation.estimate import Estimate
from shardwise.estimation.planning.candidate import Candidate, set_up
from shardwise.estimation.planning.work import Work
from shardwise.estimation.without_data.rank_run import Job, rank_runs


def estimated(candidate: Candidate, work: Work, devices: Sequence[Device]) -> Candidate:
    """The candidate with what steps on all ranks take; of memory no less than it is known to need."""
    few, more = (_estimate(candidate, work, devices, blocks) for blocks in (work.probed[0], work.probed[-1]))
    peaks = ((few.rank(rank).peak, more.rank(rank).peak) for rank in range(len(devices)))
    needed = (int(work.for_all_blocks(*both)) for both in peaks)
    found = replace(
        candidate,
        seconds=work.for_all_blocks(few.seconds, more.seconds),
        needed=tuple(map(max, candidate.needed, needed)),
    )
    return replace(found, fits=not found.lacking)


def _estimate(candidate: Candidate, work: Work, devices: Sequence[Device], blocks: int) -> Estimate:
    with work.shortened(blocks):
        job = Job(set_up, (work.model, candidate, replace(work, model=nn.Module())), {}, devices, machines(devices))
        return Estimate(candidate.name, rank_runs(job), job)
