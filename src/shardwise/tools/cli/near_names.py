"""`unknown_name`: what to say of a name or a pattern that matches no entry: what was meant, or what there is."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence

from shardwise.checkpoint.name_patterns import STAR, compile_pattern

MOST_NAMED = 5  # names in one error
MOST_COMPARED = 5_000  # names that are searched for similar ones
PARTS = re.compile(r"[/.]")


def unknown_name(text: str, names: Iterable[str]) -> str:
    """The end of an error: the name or pattern that was most likely meant; else some of the names there are.

    >>> unknown_name("model/emb.weigt", ["model/emb.weight", "model/head.weight"])
    "did you mean 'model/emb.weight'?"
    >>> unknown_name("*.weigt", ["model/emb.weight", "model/head.weight"]), unknown_name("x", ["model/emb.weight"])
    ("did you mean '*.weight'?", 'there are model/emb.weight')
    """
    known = list(names)
    near = nearest_name(text, known[:MOST_COMPARED])
    return f"did you mean '{near}'?" if near else some_names(known)


def some_names(names: Iterable[str]) -> str:
    """Names for an error message."""
    known = list(names)
    if not known:
        return "there are no entries"
    more = f" and {len(known) - MOST_NAMED:,} more" if len(known) > MOST_NAMED else ""
    return f"there are {', '.join(known[:MOST_NAMED])}{more}"


def nearest_name(text: str, names: Sequence[str]) -> str | None:
    """The known name most similar to one that is unknown; of a pattern, one that matches something."""
    if STAR not in text:
        within = [name for name in names if PARTS.split(name)[-len(PARTS.split(text)) :] == PARTS.split(text)]
        return next(iter(within or difflib.get_close_matches(text, names, n=1)), None)
    for pattern in _corrections(text, names):
        if any(compile_pattern(pattern).fullmatch(name) for name in names):
            return pattern
    return None


def _corrections(pattern: str, names: Sequence[str]) -> Iterator[str]:
    """The pattern with one of the stretches between its stars replaced by a similar one of the names."""
    pieces = pattern.split(STAR)
    for number, piece in enumerate(pieces):
        fixed = piece.strip("/.")
        begin = piece.find(fixed)
        known = _stretches(names, len(PARTS.split(fixed))) if fixed else set()
        for near in difflib.get_close_matches(fixed, sorted(known), n=2):
            changed = piece[:begin] + near + piece[begin + len(fixed) :]
            yield STAR.join([*pieces[:number], changed, *pieces[number + 1 :]])


def _stretches(names: Sequence[str], count: int) -> set[str]:
    """All runs of so many parts of the names."""
    found = set()
    for name in names:
        ends = [0, *(match.end() for match in PARTS.finditer(name)), len(name) + 1]
        found |= {name[ends[k] : ends[k + count] - 1] for k in range(len(ends) - count)}
    return found
