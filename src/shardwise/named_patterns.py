"""Patterns of names: what their stars stood for in one name is put into another."""

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
class Found:
    """What the stars and the numbers of a pattern stand for in a name."""

    stars: tuple[str, ...]
    numbers: tuple[str, ...]


def match(pattern: str, name: str, marks: str = STAR) -> Found | None:
    """What a pattern's marks stand for in a name; None if the name is not like it."""
    found = pattern_of(pattern, marks).fullmatch(name)
    if found is None:
        return None
    kinds = [mark for mark in pattern if mark in marks]
    stretches = list(zip(kinds, found.groups(), strict=True))
    return Found(*(tuple(text for kind, text in stretches if kind == mark) for mark in (STAR, NUMBER)))


def put_in(pattern: str, mark: str, stretches: Sequence[str]) -> str:
    """A pattern with these stretches instead of its marks, one after the other; the marks beyond them stay."""
    pieces = pattern.split(mark)
    marks = [*stretches[: len(pieces) - 1], *[mark] * (len(pieces) - 1 - len(stretches)), ""]
    return "".join(chain.from_iterable(zip(pieces, marks, strict=True)))


def renamer(rename: Rename) -> Callable[[str], str]:
    """The function from old names to new ones; of several patterns that a name is like, the first holds."""
    if rename is None:
        return lambda name: name
    if callable(rename):
        return rename
    rules = list(rename.items())

    def renamed(name: str) -> str:
        for old, new in rules:
            found = match(old, name)
            if found is not None:
                return put_in(new, STAR, [*found.stars, *[""] * new.count(STAR)])
        return name

    return renamed


@lru_cache(1024)
def pattern_of(pattern: str, marks: str = STAR) -> re.Pattern[str]:
    """What a pattern of names means, as a regular expression with a group for each mark."""
    as_regex = {STAR: "(.*)", NUMBER: r"(?<!\d)(\d+)(?!\d)"}
    return re.compile("".join(as_regex[c] if c in marks else re.escape(c) for c in pattern), re.DOTALL)
