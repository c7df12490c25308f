"""What is in a checkpoint, entry by entry under its name; which of it is meant, and the names it is given."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from shardwise.archive import Archive, StoredTensor
from shardwise.archive.nest import Kind, Path, name_of, parse
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.named_patterns import pattern_of

MOST_NAMED = 5  # names in one error


class UsageError(ShardwiseError, ValueError):
    """Arguments that do not fit the checkpoint."""


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor, and the archive that it is in."""

    archive: Archive
    stored: StoredTensor


@dataclass(frozen=True, eq=False)
class Contents:
    """Entries by the keys that lead to them: tensors, and values that are plain through and through."""

    tensors: Mapping[Path, Held]
    values: Mapping[Path, Any]
    whole: Any = None  # the state that they make up, as it was saved, with `StoredTensor` leaves; None if some are gone

    @staticmethod
    def of(archive: Archive) -> Contents:
        """All that an archive holds."""
        state = archive.index.state
        tensors: dict[Path, Held] = {}
        values: dict[Path, Any] = {}

        def visit(node: Any, path: Path) -> None:
            if node.kind is Kind.TENSOR:
                tensors[path] = Held(archive, node.own)
            elif node.is_value() and (node.kind is not Kind.DICT or not node.children):
                values[path] = node.own
            else:
                for key, child in node.children.items():
                    visit(child, (*path, key))

        visit(parse(state, _no_object, tensors=(StoredTensor,)), ())
        return Contents(tensors, values, state)

    @cached_property
    def by_name(self) -> dict[str, Held]:
        """The tensors by their names."""
        return {name_of(path): held for path, held in self.tensors.items()}

    @cached_property
    def values_by_name(self) -> dict[str, Any]:
        """The values by their names."""
        return {name_of(path): value for path, value in self.values.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, tied ones once."""
        return sum(
            stored.nbytes for stored in {id(held.stored): held.stored for held in self.tensors.values()}.values()
        )

    def selected(self, only: Sequence[str]) -> Contents:
        """What any of these patterns matches; each must match something."""
        require_matches([self], only)
        return self.matching(only)

    def matching(self, only: Sequence[str]) -> Contents:
        """What any of these patterns matches; all, if there are none."""
        if not only:
            return self
        rules = list(map(pattern_of, only))

        def kept(entries: Mapping[Path, Any]) -> dict[Path, Any]:
            return {path: one for path, one in entries.items() if any(r.fullmatch(name_of(path)) for r in rules)}

        return Contents(kept(self.tensors), kept(self.values))

    def renamed(self, rules: Sequence[str]) -> Contents:
        """Under other names: ``old=new``, of which the first that matches holds; each must match something."""
        if not rules:
            return self
        parsed = [(rule, *_rename_rule(rule)) for rule in rules]
        used = set()

        def new(path: Path) -> Path:
            for rule, old, parts in parsed:
                found = old.fullmatch(name_of(path))
                if found is not None:
                    used.add(rule)
                    stars = [*found.groups()[: len(parts) - 1], ""]
                    name = "".join(part + star for part, star in zip(parts, stars, strict=True))
                    return tuple(name.split("/"))
            return path

        pairs = [(path, new(path)) for path in (*self.tensors, *self.values)]
        by_new: dict[str, Path] = {}
        for path, after in pairs:
            if not all(after):
                raise UsageError(f"'{name_of(path)}' would get the name '{name_of(after)}', which has an empty part")
            if name_of(after) in by_new:
                raise UsageError(
                    f"'{name_of(by_new[name_of(after)])}' and '{name_of(path)}' would get one name, '{name_of(after)}'"
                )
            by_new[name_of(after)] = path
        for rule in rules:
            if rule not in used:
                raise UsageError(f"--rename '{rule}' matches nothing; {some_names([name_of(p) for p, _ in pairs])}")
        names = dict(pairs)
        return Contents({names[p]: h for p, h in self.tensors.items()}, {names[p]: v for p, v in self.values.items()})

    def state(self) -> Any:
        """A state with these entries, in which each tensor is its `Held`."""
        made: dict[Any, Any] = {}
        if self.whole is not None:
            return _replaced(self.whole, {id(held.stored): held for held in self.tensors.values()})
        for path, entry in (*self.tensors.items(), *self.values.items()):
            if not path:
                return entry
            inner = made
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
                if not isinstance(inner, dict):
                    raise UsageError(f"'{name_of(path)}' would lie in an entry that is no dict: --rename it")
            if path[-1] in inner:
                raise UsageError(f"'{name_of(path)}' is a name of an entry, and of others before a stroke: --rename it")
            inner[path[-1]] = entry
        return made


def require_matches(all_of: Sequence[Contents], only: Sequence[str]) -> None:
    """Raise unless each of these patterns matches something in one of the contents."""
    known = [name for contents in all_of for name in (*contents.by_name, *contents.values_by_name)]
    for text in only:
        rule = pattern_of(text)
        if not any(rule.fullmatch(name) for name in known):
            raise UsageError(f"nothing matches '{text}'; {some_names(known)}")


def merged(all_of: Sequence[tuple[str, Contents]]) -> Contents:
    """Several contents as one, which have no name in common."""
    tensors: dict[Path, Held] = {}
    values: dict[Path, Any] = {}
    found_in: dict[str, str] = {}
    for where, contents in all_of:
        for name in (*contents.by_name, *contents.values_by_name):
            if name in found_in:
                raise UsageError(
                    f"'{name}' is in '{found_in[name]}' and in '{where}': 'convert --rename' one of them first"
                )
            found_in[name] = where
        tensors.update(contents.tensors)
        values.update(contents.values)
    return all_of[0][1] if len(all_of) == 1 else Contents(tensors, values)


def some_names(names: Iterable[str]) -> str:
    """Names as an error tells them."""
    known = list(names)
    if not known:
        return "there are no entries"
    more = f" and {len(known) - MOST_NAMED:,} more" if len(known) > MOST_NAMED else ""
    return f"there are {', '.join(known[:MOST_NAMED])}{more}"


def dtype_text(dtype: torch.dtype) -> str:
    """A dtype without its module."""
    return str(dtype).removeprefix("torch.")


def _rename_rule(rule: str) -> tuple[re.Pattern[str], list[str]]:
    old, equals, new = rule.partition("=")
    if not equals or not old or not new:
        raise UsageError(f"--rename '{rule}' should be OLD=NEW, as in 'model/*=*'")
    if new.count("*") > old.count("*"):
        raise UsageError(f"--rename '{rule}' has a * on the right that stands for nothing on the left")
    return pattern_of(old), new.split("*")


def _replaced(state: Any, by_id: Mapping[int, Held]) -> Any:
    if isinstance(state, StoredTensor):
        return by_id[id(state)]
    if isinstance(state, dict):
        return {key: _replaced(inner, by_id) for key, inner in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_replaced(inner, by_id) for inner in state)
    return state


def _no_object(value: Any, path: Path) -> Any:
    raise CheckpointError(f"'{name_of(path)}' is a {type(value).__name__}, which no checkpoint holds")
