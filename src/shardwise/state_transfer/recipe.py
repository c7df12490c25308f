"""Recipes: which target is made of which sources, found out and checked before anything moves.

A recipe is a mapping from names of the target to names of the source, or expressions of them. ``*`` in a name of the
target stands for any stretch, and ``#`` for a number; in the expression they are what they stood for, one after the
other::

    {"layers.*.qkv.weight": cat("layers.*.q.weight", "layers.*.k.weight", "layers.*.v.weight")}
    {"layers.*.experts.#.up.weight": take("layers.*.experts.up.weight")["#"]}

As an index, ``#`` is the last number in the target's name. A ``#`` in a name of the source that the name of the target
has no number for runs, inside of `stack`, over all numbers that the source has, in their order::

    {"layers.*.experts.gate_up.weight": stack(cat("layers.*.experts.#.gate.weight", "layers.*.experts.#.up.weight"))}

An entry for a whole name goes before one with stars. A target without an entry is the source of the same name, or of
the one that ``rename`` gives this name. Expressions have the source's own names, whatever ``rename`` says.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from shardwise.checkpoint.name_patterns import NUMBER, STAR, PatternMatch, Rename, fill_stars, match, renamer
from shardwise.errors import RecipeError, recipe_error
from shardwise.state_transfer.changes import IndexChange, wrong
from shardwise.state_transfer.expression import Changed, Expression, Sizes, Stacked, Take, as_expression

Recipe = Mapping[str, str | Expression]

MOST_LISTED = 20  # of each kind of problem
MOST_HINTS = 5  # the search for names that are alike takes its time
MOST_COMPARED = 1000  # in one such search


def resolve(
    recipe: Recipe | None, rename: Rename, sources: Sizes, targets: Sizes, *, strict: bool = True
) -> dict[str, Expression]:
    """The expression that makes each target, without stars and of its size; all that is wrong is one `RecipeError`.

    With ``strict``, every target is made of something, and every source is used. Without it, targets that nothing
    makes are left out, and sources may be left over. Pure: no communication.
    """
    _require_form(recipe, rename)
    work = _Resolution(sources, targets)
    work.take_entries({} if recipe is None else recipe)
    work.take_same_names(rename)
    work.require_sizes()
    if strict:
        work.require_all()
    if problems := work.problems():
        raise recipe_error(problems)
    return {name: work.made[name] for name in targets if name in work.made}


def _require_form(recipe: object, rename: object) -> None:
    """Raise unless these are what they should be, whatever is in them."""
    if recipe is not None and not _is_by_name(recipe):
        raise wrong(f"a recipe is a mapping from names of the target, not {recipe!r:.80}")
    if rename is not None and not callable(rename) and not _is_by_name(rename, str):
        raise wrong(f"rename is a function, or a mapping from names to names, not {rename!r:.80}")


def _is_by_name(given: object, kind: type = object) -> bool:
    return isinstance(given, Mapping) and all(isinstance(k, str) and isinstance(v, kind) for k, v in given.items())


class _Resolution:
    """What one `resolve` has found so far, and what is wrong."""

    def __init__(self, sources: Sizes, targets: Sizes) -> None:
        self.sources, self.targets = sources, targets
        self.made: dict[str, Expression] = {}
        self._broken: set[str] = set()  # targets whose entry is wrong, of which more need not be said
        self._tried: set[str] = set()  # sources that those name
        self._wrong: dict[str, dict[str, str]] = defaultdict(dict)  # by kind: what, and the names that may be meant
        self._hints = 0
        self._numbers = _numbers_in(sources)

    def problems(self) -> list[str]:
        """A line for each thing that is wrong, not too many of a kind."""
        lines: list[str] = []
        for kind, found in self._wrong.items():
            lines += [what + hint for what, hint in found.items()][:MOST_LISTED]
            if len(found) > MOST_LISTED:
                lines.append(f"and {len(found) - MOST_LISTED} more {kind}")
        return lines

    def take_entries(self, recipe: Recipe) -> None:
        """What the recipe says of each target."""
        entry_of: dict[str, str] = {}
        for key in sorted(recipe, key=_is_pattern):  # whole names first
            found = self._targets_like(key)
            try:
                given = as_expression(recipe[key])
            except RecipeError as error:
                self._say("entries that cannot be", f"'{key}': {error}")
                self._broken |= found.keys()
                continue
            if not found:
                self._say("entries for no target", f"the recipe makes '{key}', but no target has such a name", key)
                self._tried |= given.sources
            for name, stretches in found.items():
                other = entry_of.setdefault(name, key)
                if other == key:
                    self._take(name, key, given, stretches)
                elif _is_pattern(other):
                    self._say("targets of two entries", f"'{other}' and '{key}' of the recipe both make '{name}'")

    def take_same_names(self, rename: Rename) -> None:
        """For targets without an entry, the sources of their names."""
        renamed, first = renamer(rename), dict[str, str]()
        for source in self.sources:
            found: object = renamed(source)  # by a function, which may give anything
            new = found if isinstance(found, str) else None
            if new is None:
                self._say("new names that are none", f"rename makes {found!r:.80} of '{source}', and not a name")
                self._tried.add(source)
            elif new in first:
                both = f"'{first[new]}' and '{source}' are both renamed to '{new}'"
                self._say("sources of one name", both)
                self._tried.add(source)
            elif new in self.targets and new not in self.made and new not in self._broken:
                first[new], self.made[new] = source, Take(source)

    def require_sizes(self) -> None:
        """Every expression can be, and is of its target's size."""
        for name, expression in self.made.items():
            wanted = tuple(self.targets[name])
            try:
                size = tuple(expression.size(self.sources))
            except RecipeError as error:
                for problem in error.problems:
                    self._say("expressions that do not fit", f"'{name}': {problem}")
                continue
            if size != wanted:
                text = f"the source '{expression.name}'" if isinstance(expression, Take) else expression.brief
                self._say("sizes that differ", f"the target '{name}' is of size {wanted}, but {text} of size {size}")

    def require_all(self) -> None:
        """Every target is made, and every source is used."""
        used = self._tried.union(*(expression.sources for expression in self.made.values()))
        left = [name for name in self.sources if name not in used]
        for name in self.targets:
            if name not in self.made and name not in self._broken:
                self._say("targets that nothing makes", f"nothing makes the target '{name}'", name, left)
        for name in left:
            self._say("sources that are not used", f"no target is made of the source '{name}'; strict=False leaves it")

    def _take(self, name: str, key: str, given: Expression, stretches: PatternMatch) -> None:
        """One target as its entry says, if that can be."""
        try:
            expression = given.replaced(lambda each: _with_stretches(each, stretches))
            expression = expression.replaced(self._with_numbers)
        except RecipeError as error:
            self._say("entries that cannot be", f"'{key}': {error}")
            self._broken.add(name)
            self._tried |= given.sources
            return
        unknown = sorted(expression.sources - self.sources.keys())
        if not unknown:
            self.made[name] = expression
            return
        self._broken.add(name)
        self._tried |= expression.sources
        for source in unknown:
            if numbers := self._numbers.get(source):
                self._tried.update(fill_stars(source, NUMBER, [number]) for number in numbers)
                text = f"'{name}' is made of '{source}', but # runs over all numbers only inside of stack()"
                self._say("numbers outside of stacks", text)
            else:
                text = f"'{name}' is made of '{source}', but no source has such a name"
                self._say("sources that are not there", text, source, self.sources)

    def _with_numbers(self, expression: Expression) -> Expression:
        """A stack with one part for each number that is meant by #."""
        if not isinstance(expression, Stacked):
            return expression
        parts: list[Expression] = []
        for part in expression.parts:
            open_names = [name for name in part.sources if NUMBER in name]
            numbers = {number for name in open_names for number in self._numbers.get(name, ())}
            parts += [part.replaced(partial(_numbered, [n])) for n in sorted(numbers, key=int)] or [part]
        return replace(expression, parts=tuple(parts))

    def _targets_like(self, key: str) -> dict[str, PatternMatch]:
        if not _is_pattern(key):
            return {key: PatternMatch((), ())} if key in self.targets else {}
        found = {name: match(key, name, STAR + NUMBER) for name in self.targets}
        return {name: stretches for name, stretches in found.items() if stretches is not None}

    def _say(self, kind: str, what: str, name: str | None = None, among: Iterable[str] | None = None) -> None:
        """Take a problem down, with the names that are most like the one that was not found."""
        if what in self._wrong[kind]:
            return
        near: list[str] = []
        if name is not None and self._hints < MOST_HINTS:
            self._hints += 1
            names = [other for other in (self.targets if among is None else among) if other != name]
            last = name.rsplit(".", 1)[-1]
            likely = [other for other in names if other.endswith(last)] if len(names) > MOST_COMPARED else names
            near = difflib.get_close_matches(name, (likely or names)[:MOST_COMPARED], n=2)
        self._wrong[kind][what] = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def _is_pattern(key: str) -> bool:
    return STAR in key or NUMBER in key


def _with_stretches(expression: Expression, found: PatternMatch) -> Expression:
    """Names and indices with what the marks of the target's name stand for."""
    if isinstance(expression, Take):
        if expression.name.count(STAR) > len(found.stars):
            raise wrong(f"'{expression.name}' has more stars than the name of the target")
        return _numbered(found.numbers, Take(fill_stars(expression.name, STAR, found.stars)))
    if (
        isinstance(expression, Changed)
        and isinstance(expression.change, IndexChange)
        and NUMBER in expression.change.items
    ):
        if not found.numbers:
            raise wrong(f"{expression.brief} wants a number, but there is no # in the name of the target")
        number = int(found.numbers[-1])
        items = tuple(number if item == NUMBER else item for item in expression.change.items)
        return replace(expression, change=IndexChange(items))
    return expression


def _numbered(numbers: Sequence[str], expression: Expression) -> Expression:
    """A name with these numbers in it, if it is one."""
    return Take(fill_stars(expression.name, NUMBER, numbers)) if isinstance(expression, Take) else expression


def _numbers_in(names: Iterable[str]) -> dict[str, list[str]]:
    """For each name with # instead of one of its numbers, the numbers that there are."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        for run in re.finditer(r"\d+", name):
            found[name[: run.start()] + NUMBER + name[run.end() :]].append(run.group())
    return found
