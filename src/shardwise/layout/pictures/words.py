"""Numbers as text: bytes or elements, lists of ranks, lengths of parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

MOST_RUNS = 4  # of ranks or lengths in one phrase


def bytes_text(count: int) -> str:
    """A number of bytes as text: ``1.5 KiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def count_text(count: int) -> str:
    """A count as text: ``1,024`` or ``1.6 M``."""
    if count < 100_000:
        return f"{count:,}"
    value, units = count / 1000, "kMGT"
    while value >= 999.95 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:,.1f} {units[0]}"


@dataclass(frozen=True)
class SizeUnit:
    """The unit of amounts: bytes, or elements where no dtype is known."""

    itemsize: int | None

    @staticmethod
    def of(dtype: torch.dtype | None) -> SizeUnit:
        """Bytes of this dtype, or elements."""
        return SizeUnit(None if dtype is None else dtype.itemsize)

    def text(self, elements: int) -> str:
        """An amount without the word for elements."""
        return count_text(elements) if self.itemsize is None else bytes_text(elements * self.itemsize)

    def phrase(self, elements: int) -> str:
        """An amount with the word for elements."""
        if self.itemsize is None:
            return f"{self.text(elements)} element{'s' * (elements != 1)}"
        return self.text(elements)


def numbered(count: int, noun: str) -> str:
    """``1 shard``, ``2 shards``, ``2 boxes``, ``2 copies``."""
    if count == 1:
        return f"1 {noun}"
    endings = {"y": f"{noun[:-1]}ies", "x": f"{noun}es"}
    return f"{count:,} {endings.get(noun[-1], f'{noun}s')}"


def size_text(size: Sequence[int], times: str = " × ") -> str:
    """A tensor's size."""
    return times.join(map(str, size)) or "scalar"


def percent(part: float) -> str:
    """A share as text: ``25%``; a share above 0 is never 0%."""
    return "<1%" if 0 < part < 0.005 else f"{part:.0%}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks as text: ``rank 3``, ``ranks 0–3, 6``, or the first of many runs and the number of ranks."""
    known = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in known:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    shown = [
        str(run[0]) if len(run) == 1 else f"{run[0]}{'–' if run[-1] > run[0] + 1 else ', '}{run[-1]}" for run in runs
    ]
    if len(runs) > MOST_RUNS:
        return f"{len(known):,} ranks: {', '.join(shown[: MOST_RUNS - 1])} … {known[-1]}"
    return f"rank{'s' * (len(known) != 1)} {', '.join(shown)}"


def lengths_text(lengths: Sequence[int]) -> str:
    """The lengths that a dim is cut into: ``3 × 251 + 248``; of many different lengths, their number and range."""
    runs = [(length, len(list(group))) for length, group in groupby(lengths)]
    if len(runs) > MOST_RUNS:
        return f"{len(lengths)} parts of {min(lengths)} to {max(lengths)}"
    return " + ".join(str(length) if count == 1 else f"{count} × {length}" for length, count in runs)
