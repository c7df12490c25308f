"""`ReasonedPlan`: a plan that says for every parameter what was chosen, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from shardwise.layout.specs import ShardingSpec
from shardwise.nn.sharding_plan import ShardingPlan

HEADINGS = ("parameter", "size", "cut", "why")
LAYER = re.compile(r"(?<![^.])\d+(?![^.])")  # a number between dots
PLAIN = "plain"


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

    plan: dict[str, ShardingSpec]
    reasons: tuple[Reason, ...] = field(default=(), repr=False)
    note: str = field(default="", repr=False)  # what is to be known of the plan as a whole

    def __str__(self) -> str:
        alike: dict[tuple[str, ...], list[str]] = {}  # the names of those that a line stands for
        for one in self.reasons:
            size = "×".join(map(str, one.size)) or "scalar"
            alike.setdefault((LAYER.sub("*", one.name), size, one.cut, one.why), []).append(one.name)
        table = [HEADINGS]
        for (pattern, size, cut, why), names in alike.items():
            table.append((f"{pattern}  ({len(names)}×)" if len(names) > 1 else names[0], size, cut, why))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)
        cut_ones = sum(one.cut != PLAIN for one in self.reasons)
        notes = [self.note] if self.note else []
        return "\n".join((*lines, f"{cut_ones} of {len(self.reasons)} parameters are cut", *notes))
