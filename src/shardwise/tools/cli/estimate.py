"""``shardwise estimate``: what a step under a plan would need on every rank, and whether it fits."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from shardwise.estimation.planning import estimate_candidate
from shardwise.layout.pictures.words import ranks_text
from shardwise.tools.cli.console import Console
from shardwise.tools.cli.planned_job import make_model, read_plan, require_folder


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command; 1 if some rank has too little memory."""
    candidate, job = read_plan(options.plan)
    job = job.changed(
        devices=options.devices, batch=options.batch, optimizer=options.optimizer, precision=options.precision
    )
    require_folder(options.report)
    candidate = replace(candidate, samples=tuple(in_proportion(job.batch[0], candidate.samples)))
    needs = estimate_candidate(make_model(options.model), candidate, **job.options())
    fit = needs.fits()
    ranks = [
        {"ranks": ranks_text(one.ranks), "device": one.device, "needed": one.needed, "memory": one.memory}
        for one in fit.ranks
    ]
    console.give({"fits": bool(fit), "seconds": needs.seconds, "ranks": ranks, "help": fit.help})
    console.line(str(needs))
    console.line()
    console.line(str(fit), "green" if fit else "red")
    if options.report is not None:
        needs.save(options.report)
        console.line(f"wrote the page to {options.report}", "green")
    return 0 if fit else 1


def in_proportion(total: int, shares: Sequence[int]) -> list[int]:
    """A number of samples, cut like another: the largest remainders are rounded up.

    >>> in_proportion(6, [4, 2]), in_proportion(5, [4, 2]), in_proportion(1, [2, 3])
    ([4, 2], [3, 2], [0, 1])
    """
    whole = sum(shares)
    cut = [total * share // whole for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: -(total * shares[k] % whole))
    for k in by_remainder[: total - sum(cut)]:
        cut[k] += 1
    return cut
