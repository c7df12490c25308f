"""What all trials of an op say about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

VERDICTS = ("right", "partly", "refused", "wrong", "diverged")
WAYS = ("forward", "backward")


@dataclass
class Tally:
    """The trials of one op on one system, one way."""

    right: int = 0
    refused: int = 0
    wrong: int = 0
    diverged: int = 0
    notes: dict[str, str] = field(default_factory=dict)  # the first of each verdict that is not right

    def add(self, verdict: str, note: str) -> None:
        """Count a trial."""
        setattr(self, verdict, getattr(self, verdict) + 1)
        if verdict != "right":
            self.notes.setdefault(verdict, note)

    @property
    def trials(self) -> int:
        """How many there were."""
        return self.right + self.refused + self.wrong + self.diverged

    @property
    def verdict(self) -> str:
        """The op's: the worst that happened, and `partly` when some were right and the rest refused."""
        for worst in ("diverged", "wrong"):
            if getattr(self, worst):
                return worst
        if not self.refused:
            return "right"
        return "partly" if self.right else "refused"

    @property
    def note(self) -> str:
        """Why it is not right."""
        return self.notes.get(self.verdict) or self.notes.get("refused", "")

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        counts = {"right": self.right, "refused": self.refused, "wrong": self.wrong, "diverged": self.diverged}
        return {"verdict": self.verdict, **counts, "notes": self.notes}


@dataclass
class OpResult:
    """One op on one system."""

    forward: Tally = field(default_factory=Tally)
    backward: Tally = field(default_factory=Tally)
    capped: int = 0  # samples that there was no time for
    seconds: float = 0.0
    gathered: set[tuple[int, ...]] = field(default_factory=set)  # operands put together without a budget for it

    def way(self, name: str) -> Tally:
        """The tally of `forward` or `backward`."""
        return self.forward if name == "forward" else self.backward

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        ways = {way: self.way(way).to_json() for way in WAYS if self.way(way).trials}
        return {**ways, "capped": self.capped, "seconds": round(self.seconds, 2), "gathered": sorted(self.gathered)}


@dataclass
class Findings:
    """Everything that was found: per op why it was left out, or per system how it went."""

    systems: list[str]
    kind: str = "ops"
    left_out: dict[str, str] = field(default_factory=dict)
    results: dict[str, dict[str, OpResult]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        results = {name: {s: r.to_json() for s, r in by_system.items()} for name, by_system in self.results.items()}
        return {"kind": self.kind, "systems": self.systems, "left_out": self.left_out, "results": results}
