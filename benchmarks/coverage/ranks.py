"""What each rank does for one op: every trial of it, in step with the others, told in a journal."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.coverage.control import Control, Diverged
from benchmarks.coverage.database import Case, NoCases, cases, names
from benchmarks.coverage.systems import System, system
from benchmarks.coverage.trial import Judgement, Trial
from benchmarks.coverage.truth import Truth, digest, truth_of
from benchmarks.coverage.watch import Watch


class Journal:
    """A file of one JSON record a line, written by rank 0: what was done by a rank that hung is still known."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self._file = path.open("a") if writes else None

    def write(self, **record: Any) -> None:
        """Add a record."""
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Write no more."""
        if self._file is not None:
            self._file.close()


def all_names(patterns: list[str]) -> list[str]:
    """The names of the ops to try, asked of a rank because it has the database loaded already."""
    return names(patterns)


def try_op(name: str, systems: list[str], path: str, most: int, seconds: float, device: str) -> None:
    """Try an op on these systems and this device; every rank calls it.

    Raises when the ranks diverge, for then they are of no use.
    """
    folder, rank = Path(path), dist.get_rank()
    journal = Journal(folder / "journal", writes=rank == 0)
    with Watch(folder / f"hung-{rank}") as watch, contextlib.closing(journal):
        control = Control(watch)
        try:
            known = list(_known(cases(name, most, device)))
        except NoCases as error:
            journal.write(left_out=str(error))
            return
        if not known:
            journal.write(left_out="raises on plain tensors")
            return
        if len(set(control.exchange("samples", _digest(known)))) > 1:
            journal.write(left_out="samples differ between ranks")
            return
        journal.write(differentiable=any(truth.gradients is not None for _, truth in known))
        for system_name in systems:
            _try_system(system(system_name, device), system_name, known, control, journal, seconds)


def _known(found: list[Case]) -> Iterator[tuple[Case, Truth]]:
    for case in found:
        with contextlib.suppress(Exception):  # what fails on plain tensors has no truth
            yield case, truth_of(case)


def _digest(known: list[tuple[Case, Truth]]) -> str:
    return digest([leaf for case, _ in known for leaf in case.arguments if not callable(leaf)])


def _try_system(
    chosen: System, name: str, known: list[tuple[Case, Truth]], control: Control, journal: Journal, seconds: float
) -> None:
    begin = time.monotonic()
    for number, (case, truth) in enumerate(known):
        for cut in case.cuts():
            trial = Trial(chosen, case, truth, cut, control)
            _try(trial, journal, {"system": name, "sample": number, "cut": cut, "of": str(case)})
        if max(control.exchange("time", time.monotonic() - begin)) > seconds:
            journal.write(system=name, capped=len(known) - number - 1)
            break
    journal.write(system=name, seconds=time.monotonic() - begin)


def _try(trial: Trial, journal: Journal, where: dict[str, Any]) -> None:
    forward = _noted(trial, "forward", journal, where)
    if trial.truth.gradients is None:
        return
    if forward.verdict == "refused":
        journal.write(**where, way="backward", **asdict(forward))
    else:
        _noted(trial, "backward", journal, where)


def _noted(trial: Trial, way: str, journal: Journal, where: dict[str, Any]) -> Judgement:
    journal.write(**where, begins=way)
    try:
        judgement = trial.forward() if way == "forward" else trial.backward()
    except Diverged as error:
        judgement = Judgement("diverged", str(error))
    journal.write(**where, way=way, **asdict(judgement))
    if judgement.verdict == "diverged":
        raise Diverged(judgement.note)
    return judgement
