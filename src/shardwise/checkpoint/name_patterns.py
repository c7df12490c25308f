"""Patterns of names with ``*`` and ``#``: matching a name, and renaming by two patterns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

Rename = Mapping[str, str] | Callable[[str], str] | None  # from names, or patterns, to names

STAR = "*"  # any stretch of a name
NUMBER = "#"  # a number in a name: all of its digits


@dataclass(frozen=True)
class PatternMatch:
    """The parts of a name that the stars and the number marks of a pattern match."""

    stars: tuple[str, ...]
    numbers: tuple[str, ...]


def match(pattern: str, name: str, marks: str = STAR) -> PatternMatch | None:
    """The parts of the name that the pattern's marks match; None if the name does not match."""
    found = compile_pattern(pattern, marks).fullmatch(name)
    if found is None:
        return None
    kinds = [mark for mark in pattern if mark in marks]
    parts = list(zip(kinds, found.groups(), strict=True))
    return PatternMatch(*(tuple(text for kind, text in parts if kind == mark) for mark in (STAR, NUMBER)))


def fill_stars(pattern: str, mark: str, parts: Sequence[str]) -> str:
    """The pattern with these parts in the place of its marks, in order; marks without a part stay."""
    pieces = pattern.split(mark)
    marks = [*parts[: len(pieces) - 1], *[mark] * (len(pieces) - 1 - len(parts)), ""]
    return "".join(chain.from_iterable(zip(pieces, marks, strict=True)))


def renamer(rename: Rename) -> Callable[[str], str]:
    """The function from old names to new ones; the first pattern that matches a name decides."""
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    rules = list(rename.items())

    def renamed(name: str) -> str:
        for old, new in rules:
            found = match(old, name)
            if found is not None:
                return fill_stars(new, STAR, [*found.stars, *[""] * new.count(STAR)])
        return name

    return renamed


@lru_cache(1024)
def compile_pattern(pattern: str, marks: str = STAR) -> re.Pattern[str]:
    """A pattern as a regular expression, with a group for each mark."""
    as_regex = {STAR: "(.*)", NUMBER: r"(?<!\d)(\d+)(?!\d)"}
    return re.compile("".join(as_regex[c] if c in marks else re.escape(c) for c in pattern), re.DOTALL)
