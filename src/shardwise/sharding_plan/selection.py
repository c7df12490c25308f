"""Which entry of a plan holds for which thing: full names before patterns, and one entry for each thing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

from shardwise.errors import PlanError, PlanNameError
from shardwise.sharding_plan.tree import is_pattern, matches, nearest

E = TypeVar("E")


@dataclass(frozen=True)
class Names:
    """The names that one part of a plan may use."""

    known: Collection[str]
    within_reach: Collection[str]  # of these, those that a pattern may mean
    same: Callable[[str], list[str]]  # all names of the thing that has this name
    missing: Callable[[str], Exception]  # why this is no name

    def meant_by(self, key: str) -> list[str]:
        """The names that a key of the plan stands for."""
        if key in self.known:
            return [key]
        if not is_pattern(key):
            raise self.missing(key)
        matched = [name for name in self.known if name and matches(key, name)]
        if not matched:
            near = " or ".join(map(repr, nearest(key, filter(None, self.known))))
            hint = f"; did you mean {near}?" if near else ""
            raise PlanNameError(f"the pattern {key!r} matches nothing: the module has no attribute like that{hint}")
        return [name for name in matched if name in self.within_reach]


def choose(entries: Mapping[str, E], names: Names, noting: Callable[[], AbstractContextManager[None]]) -> dict[str, E]:
    """For each thing that is meant, by one of its names, the entry that holds; what is raised is noted key by key.

    They are in the order of the names, not of the entries, so that ranks act in the same order.
    """
    said: dict[str, list[tuple[str, str]]] = {}  # by the first name of a thing: keys that mean it, and by which name
    for key in entries:
        with noting():
            for name in names.meant_by(key):
                said.setdefault(names.same(name)[0], []).append((key, name))
    chosen = {}
    for all_said in said.values():
        (key, name), *others = [one for one in all_said if one[0] in names.known] or all_said
        chosen[name] = entries[key]
        for other_key, other_name in others:
            with noting():
                if entries[other_key] != entries[key]:
                    same = "" if name == other_name else f", which is the same as {other_name!r}"
                    raise PlanError(
                        f"{key!r} and {other_key!r} say different things of {name!r}{same}: keep one of them"
                    )
    return {name: chosen[name] for name in names.known if name in chosen}
