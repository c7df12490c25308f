"""`ReasonedPlan`: a plan that says for every parameter what was chosen, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from shardwise.sharding_plan import ShardingPlan

HEADINGS = ("parameter", "size", "cut", "why")


@dataclass(frozen=True)
class Reason:
    """What a plan does with one parameter: its name and size, how it is cut, and why."""

    name: str
    size: tuple[int, ...]
    cut: str  # in words; "plain" where the parameter stays as it is
    why: str


@dataclass
class ReasonedPlan(ShardingPlan):
    """A `ShardingPlan` with a `Reason` for each parameter of the module; ``print(plan)`` shows them as a table.

    In the table, layers that are treated alike are one line: their numbers are written ``*``, and counted. Change what
    you like in ``plan.plan``, which has a spec by the full name of each parameter that is cut; what is not in it stays
    plain.
    """

    reasons: tuple[Reason, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        lines: dict[tuple[str, ...], int] = {}
        for one in self.reasons:
            key = re.sub(r"(?<![^.])\d+(?![^.])", "*", one.name), "×".join(map(str, one.size)) or "scalar", one.cut, one.why
            lines[key] = lines.get(key, 0) + 1
        table = [HEADINGS]
        for (name, *others), count in lines.items():
            table.append((f"{name}  ({count}×)" if count > 1 else name, *others))  # type: ignore[arg-type] # of four
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        rows = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)
        cut = sum(one.cut != "plain" for one in self.reasons)
        return "\n".join((*rows, f"{cut} of {len(self.reasons)} parameters are cut"))
