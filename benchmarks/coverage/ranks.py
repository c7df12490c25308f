"""What each rank does for one op: every trial of it, in step with the others, told in a journal."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
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


class Tried(Protocol):
    """Something to be tried, forward and then backward."""

    @property
    def differentiable(self) -> bool:
        """Whether it is tried backward."""

    def forward(self) -> Judgement:
        """How it goes forward."""

    def backward(self) -> Judgement:
        """How it goes backward."""


@dataclass(frozen=True)
class Session:
    """What the trials of one op share: the line between the ranks, and the journal."""

    control: Control
    journal: Journal

    def attempt(self, trial: Tried, where: dict[str, Any]) -> None:
        """Try one thing, and tell how it went. Raises when the ranks diverge."""
        forward = _noted(trial, "forward", self.journal, where)
        if not trial.differentiable:
            return
        if forward.verdict == "refused":
            self.journal.write(**where, way="backward", **asdict(forward))
        else:
            _noted(trial, "backward", self.journal, where)

    def late(self, begin: float, seconds: float) -> bool:
        """Whether it is so many seconds since the beginning, on any rank."""
        late: bool = max(self.control.exchange("time", time.monotonic() - begin)) > seconds
        return late


@contextlib.contextmanager
def session(path: str) -> Iterator[Session]:
    """A session that is told in files of this folder; a rank that hangs in it is ended."""
    folder, rank = Path(path), dist.get_rank()
    journal = Journal(folder / "journal", writes=rank == 0)
    with Watch(folder / f"hung-{rank}") as watch, contextlib.closing(journal):
        yield Session(Control(watch), journal)


def try_op(name: str, systems: list[str], path: str, most: int, seconds: float, device: str) -> None:
    """Try an op on these systems and this device; every rank calls it.

    Raises when the ranks diverge, for then they are of no use.
    """
    torch.backends.cudnn.allow_tf32 = False  # which rounds the sums of a convolution more than a comparison allows
    with session(path) as here:
        control, journal = here.control, here.journal
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
            _try_system(system(system_name, device), system_name, known, here, seconds)


def _known(found: list[Case]) -> Iterator[tuple[Case, Truth]]:
    for case in found:
        with contextlib.suppress(Exception):  # what fails on plain tensors has no truth
            yield case, truth_of(case)


def _digest(known: list[tuple[Case, Truth]]) -> str:
    return digest([leaf for case, _ in known for leaf in case.arguments if not callable(leaf)])


def _try_system(chosen: System, name: str, known: list[tuple[Case, Truth]], here: Session, seconds: float) -> None:
    begin = time.monotonic()
    for number, (case, truth) in enumerate(known):
        for cut in case.cuts():
            trial = Trial(chosen, case, truth, cut, here.control)
            where = {"system": name, "sample": number, "cut": f"cut in the {cut} dim", "of": str(case)}
            here.attempt(trial, where)
        if here.late(begin, seconds):
            here.journal.write(system=name, capped=len(known) - number - 1)
            break
    here.journal.write(system=name, seconds=time.monotonic() - begin)


def _noted(trial: Tried, way: str, journal: Journal, where: dict[str, Any]) -> Judgement:
    journal.write(**where, begins=way)
    try:
        judgement = trial.forward() if way == "forward" else trial.backward()
    except Diverged as error:
        judgement = Judgement("diverged", str(error))
    journal.write(**where, way=way, **asdict(judgement))
    if judgement.verdict == "diverged":
        raise Diverged(judgement.note)
    return judgement
