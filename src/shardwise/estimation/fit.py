"""`Fit`: whether a step fits the memory of the ranks, by how much, and what would help."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.errors import EstimateError
from shardwise.estimation.account.ledger import (
    ACTIVATIONS,
    GATHERED,
    GRADIENTS,
    PARAMETERS,
    STATES,
    TEMPORARIES,
    TRANSFERS,
)
from shardwise.layout.pictures.words import bytes_text, ranks_text
from shardwise_command.byte_counts import parse_bytes

if TYPE_CHECKING:
    from shardwise.estimation.rank_estimate import RankEstimate

Capacity = int | str
Capacities = Capacity | Mapping[str | int, Capacity]

RUNTIME = "memory that libraries keep"
HELP = {  # for the category that has most at the peak
    ACTIVATIONS: "recompute activations (torch.utils.checkpoint around each block), or fewer samples at once",
    STATES: "share the states out over more ranks (shardwise.fully_shard), or take an optimizer with fewer states",
    PARAMETERS: "share the parameters out over more ranks (shardwise.fully_shard), or keep them in bfloat16",
    GRADIENTS: "share the gradients out over more ranks (shardwise.fully_shard)",
    GATHERED: "gather less at once: smaller units, prefetch=0, or a lower precision in shardwise.fully_shard",
    TRANSFERS: "gather and sum less at once: smaller units of shardwise.fully_shard",
    TEMPORARIES: "fewer samples at once; of a large vocabulary, compute the loss in pieces",
    RUNTIME: "a device with more memory: libraries keep this much under any plan",
}


@dataclass(frozen=True)
class RankFit:
    """One rank, or several that are alike."""

    ranks: Sequence[int]
    device: str
    needed: int
    memory: int
    most: str  # the category that has most at the peak
    of_most: int  # its bytes

    @property
    def spare(self) -> int:
        """Bytes that are left over; below 0, that are missing."""
        return self.memory - self.needed


@dataclass(frozen=True)
class Fit:
    """Whether a step fits: true or false; printed, it says by how much, and what would help."""

    ranks: Sequence[RankFit]

    def __bool__(self) -> bool:
        return all(one.spare >= 0 for one in self.ranks)

    @property
    def lacking(self) -> dict[int, int]:
        """By rank, the bytes that are missing; ranks that have enough are left out."""
        return {rank: -one.spare for one in self.ranks if one.spare < 0 for rank in one.ranks}

    @property
    def spare(self) -> int:
        """The bytes that are left over on the fullest rank; below 0, that are missing."""
        return min(one.spare for one in self.ranks)

    @property
    def help(self) -> str:
        """What would help most on the rank that lacks most; empty if all fit."""
        worst = min(self.ranks, key=lambda one: one.spare)
        return "" if self else HELP.get(worst.most, "")

    def __str__(self) -> str:
        lines = ["It fits." if self else "It does not fit."]
        for one in self.ranks:
            what = f"{bytes_text(one.spare)} to spare" if one.spare >= 0 else f"lacks {bytes_text(-one.spare)}"
            needs = f"needs {bytes_text(one.needed)} of {bytes_text(one.memory)}"
            lines.append(f"  {ranks_text(one.ranks)} ({one.device}): {needs}, {what}")
            if one.spare < 0:
                lines.append(f"    most of it: {one.most}, {bytes_text(one.of_most)}")
        if self.help:
            lines.append(f"What would help: {self.help}.")
        return "\n".join(lines)


def fit_of(parts: Iterable[RankEstimate], given: Capacities | None, world: int) -> Fit:
    """Whether these ranks have enough of the memory that is given, or else of what their devices have."""
    memory = _by_rank(given, world)
    found: list[RankFit] = []
    for part in parts:
        sizes: dict[int, list[int]] = {}
        for rank in part.ranks:
            sizes.setdefault(memory.get(rank, part.device.memory), []).append(rank)
        held = {**part.at_peak, RUNTIME: part.device.reserved}
        most = max(held, key=lambda name: held[name])
        for size, ranks in sizes.items():
            found.append(RankFit(ranks, part.device.name, part.peak, size, most, held[most]))
    return Fit(found)


def _by_rank(given: Capacities | None, world: int) -> dict[int, int]:
    """The bytes of ranks that are named, by rank."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        return dict.fromkeys(range(world), _bytes(given))
    return {_rank(name, world): _bytes(size) for name, size in given.items()}


def _rank(name: str | int, world: int) -> int:
    text = str(name)
    number = text.removeprefix("rank:").partition("/")[0]
    if not number.isdigit() or int(number) >= world:
        raise EstimateError(f"{name!r:.80} is no rank of this world: write 'rank:0' to 'rank:{world - 1}'")
    return int(number)


def _bytes(size: Capacity) -> int:
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise EstimateError(f"memory is a number of bytes, or a text such as '80 GiB'; found {size!r:.80}")
    try:
        return size if isinstance(size, int) else parse_bytes(size)
    except ValueError as error:
        raise EstimateError(f"{size!r:.80}: {error}") from None
