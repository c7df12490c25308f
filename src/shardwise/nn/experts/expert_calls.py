"""`ExpertCalls`: the calls of experts that a module makes in its forward, noted and answered."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.errors import PropertyError

TAKES = "an expert of a list is called with tensors, of which each has a row for each token"


@dataclass(frozen=True, eq=False)
class ExpertCall:
    """One call of an expert."""

    expert: int
    given: tuple[torch.Tensor, ...]  # its arguments

    @property
    def rows(self) -> int:
        """The number of tokens."""
        return len(self.given[0])

    @property
    def form(self) -> RowsForm:
        """That of its arguments."""
        return RowsForm(tuple((tuple(one.shape[1:]), one.dtype) for one in self.given))

    def require(self, form: RowsForm | None) -> None:
        """Raise unless its arguments are of the form that all calls of experts have."""
        if self.form != form:
            raise PropertyError(
                f"experts of a list are all called with rows of the same sizes and dtypes: found {self.form} for "
                f"expert {self.expert}, and {form} before"
            )


@dataclass(frozen=True)
class RowsForm:
    """The arguments of an expert: for each the size of a row, and its dtype."""

    parts: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    def __str__(self) -> str:
        return ", ".join(f"{dtype} of {'×'.join(map(str, size)) or 1}" for size, dtype in self.parts)

    def joined(self, calls: Sequence[ExpertCall], device: torch.device) -> list[torch.Tensor]:
        """The rows of all calls, flat, for each argument."""
        found = []
        for number, (size, dtype) in enumerate(self.parts):
            rows = [call.given[number].reshape(call.rows, math.prod(size)) for call in calls]
            empty = torch.empty(0, math.prod(size), dtype=dtype, device=device)
            found.append(rows[0] if len(rows) == 1 else torch.cat(rows) if rows else empty)
        return found

    def separate(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Flat rows in their own sizes."""
        return [one.reshape(len(one), *size) for one, (size, _) in zip(rows, self.parts, strict=False)]

    def told(self) -> list[Any]:
        """As plain values, for other ranks."""
        return [[list(size), str(dtype).rpartition(".")[2]] for size, dtype in self.parts]

    @staticmethod
    def heard(told: Sequence[Any]) -> RowsForm:
        """From what `told` gives."""
        return RowsForm(tuple((tuple(size), getattr(torch, dtype)) for size, dtype in told))


class ExpertCalls:
    """The calls of the forward that runs now."""

    def __init__(self) -> None:
        self._noted: list[ExpertCall] | None = None
        self._answers: Iterator[torch.Tensor] | None = None
        self._echoes = False

    @contextmanager
    def answered(self, answers: Sequence[torch.Tensor] | None, *, echoes: bool = False) -> Iterator[list[ExpertCall]]:
        """The calls that are made within, answered with these, or else with zeros, or with what they were given."""
        before = self._noted, self._answers, self._echoes
        self._noted, self._answers, self._echoes = [], None if answers is None else iter(answers), echoes
        try:
            yield self._noted
        finally:
            self._noted, self._answers, self._echoes = before

    def answer(self, expert: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Note a call, and answer it."""
        if self._noted is None:
            raise PropertyError("experts of a list compute within the forward of the module that has the list")
        given = tuple(args)
        if kwargs or not given or not all(isinstance(one, torch.Tensor) and one.ndim for one in given):
            raise PropertyError(f"{TAKES}: found {[type(one).__name__ for one in given]} and {list(kwargs)}")
        if len({len(one) for one in given}) > 1:
            raise PropertyError(f"{TAKES}: found sizes {[tuple(one.shape) for one in given]}")
        self._noted.append(ExpertCall(expert, given))
        if self._answers is not None:
            return next(self._answers)
        return given[0].detach().clone() if self._echoes else torch.zeros_like(given[0])
