"""`Contents`: the entries of a checkpoint by name, selected and renamed; and how they lie in its files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.checkpoint.archive import Archive, Index, StoredTensor
from shardwise.checkpoint.archive.state_tree import NodeKind, Path, entry_name, parse_state
from shardwise.checkpoint.name_patterns import compile_pattern
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.layout import Grid, Layout
from shardwise.layout.pictures.words import numbered
from shardwise.tools.cli.near_names import unknown_name


class UsageError(ShardwiseError, ValueError):
    """Arguments that do not fit the checkpoint."""


@dataclass(frozen=True, eq=False)
class HeldTensor:
    """A stored tensor with its archive."""

    archive: Archive
    stored: StoredTensor


@dataclass(frozen=True, eq=False)
class Contents:
    """Tensors and plain values, by path."""

    tensors: Mapping[Path, HeldTensor]
    values: Mapping[Path, Any]
    whole: Any = None  # the saved state, with `StoredTensor` leaves; None if entries were left out or renamed

    @staticmethod
    def of(archive: Archive) -> Contents:
        """All entries of an archive."""
        state = archive.index.state
        tensors: dict[Path, HeldTensor] = {}
        values: dict[Path, Any] = {}

        def visit(node: Any, path: Path) -> None:
            if node.kind is NodeKind.TENSOR:
                tensors[path] = HeldTensor(archive, node.value)
            elif node.is_value() and (node.kind is not NodeKind.DICT or not node.children):
                values[path] = node.value
            else:
                for key, child in node.children.items():
                    visit(child, (*path, key))

        visit(parse_state(state, refuse_objects, tensors=(StoredTensor,)), ())
        return Contents(tensors, values, state)

    @cached_property
    def by_name(self) -> dict[str, HeldTensor]:
        """The tensors by name."""
        return {entry_name(path): held for path, held in self.tensors.items()}

    @cached_property
    def values_by_name(self) -> dict[str, Any]:
        """The values by name."""
        return {entry_name(path): value for path, value in self.values.items()}

    @cached_property
    def distinct(self) -> list[StoredTensor]:
        """The tensors, tied ones once."""
        return list({id(held.stored): held.stored for held in self.tensors.values()}.values())

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors, tied ones once."""
        return sum(stored.nbytes for stored in self.distinct)

    def selected(self, only: Sequence[str]) -> Contents:
        """The entries that match any of the patterns; each pattern must match something."""
        require_matches([self], only)
        return self.matching(only)

    def matching(self, only: Sequence[str]) -> Contents:
        """The entries that match any of the patterns; all, without patterns."""
        if not only:
            return self
        rules = list(map(compile_pattern, only))

        def kept(entries: Mapping[Path, Any]) -> dict[Path, Any]:
            return {path: one for path, one in entries.items() if any(r.fullmatch(entry_name(path)) for r in rules)}

        return Contents(kept(self.tensors), kept(self.values))

    def renamed(self, rules: Sequence[str], *, need_match: bool = True) -> Contents:
        """The entries renamed by rules ``old=new``: the first match counts.

        Raises where a rule matches nothing, unless ``need_match`` is False.
        """
        if not rules:
            return self
        if need_match:
            require_rename_rules([self], rules)
        parsed = list(map(_rename_rule, rules))

        def new(path: Path) -> Path:
            for old, parts in parsed:
                found = old.fullmatch(entry_name(path))
                if found is not None:
                    stars = [*found.groups()[: len(parts) - 1], ""]
                    name = "".join(part + star for part, star in zip(parts, stars, strict=True))
                    return tuple(name.split("/"))
            return path

        pairs = [(path, new(path)) for path in (*self.tensors, *self.values)]
        by_new: dict[str, Path] = {}
        for path, after in pairs:
            if "" in after:
                raise UsageError(
                    f"'{entry_name(path)}' would get the name '{entry_name(after)}', which has an empty part"
                )
            if entry_name(after) in by_new:
                raise UsageError(
                    f"'{entry_name(by_new[entry_name(after)])}' and '{entry_name(path)}' would get one name, "
                    f"'{entry_name(after)}'"
                )
            by_new[entry_name(after)] = path
        names = dict(pairs)
        return Contents({names[p]: h for p, h in self.tensors.items()}, {names[p]: v for p, v in self.values.items()})

    def state(self) -> Any:
        """The state with these entries, and with a `HeldTensor` for each tensor."""
        state: dict[Any, Any] = {}
        if self.whole is not None:
            return _replaced(self.whole, {id(held.stored): held for held in self.tensors.values()})
        for path, entry in (*self.tensors.items(), *self.values.items()):
            if not path:
                return entry
            inner = state
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
                if not isinstance(inner, dict):
                    raise UsageError(f"'{entry_name(path)}' would lie in an entry that is no dict: --rename it")
            if path[-1] in inner:
                raise UsageError(
                    f"'{entry_name(path)}' is a name of an entry, and of others before a stroke: --rename it"
                )
            inner[path[-1]] = entry
        return state


def tensors_text(tensors: int, names: int) -> str:
    """How many tensors there are, tied ones once, and under how many names if those are more."""
    return numbered(tensors, "tensor") + (f" under {numbered(names, 'name')}" if names != tensors else "")


def require_matches(all_of: Sequence[Contents], only: Sequence[str]) -> None:
    """Raise unless each pattern matches something in one of the contents."""
    known = [name for contents in all_of for name in (*contents.by_name, *contents.values_by_name)]
    for text in only:
        rule = compile_pattern(text)
        if not any(rule.fullmatch(name) for name in known):
            raise UsageError(f"nothing matches '{text}'; {unknown_name(text, known)}")


def require_rename_rules(all_of: Sequence[Contents], rules: Sequence[str]) -> None:
    """Raise unless each rule ``old=new`` matches something in one of the contents that no rule before it does."""
    names = [name for contents in all_of for name in (*contents.by_name, *contents.values_by_name)]
    known, rest = list(names), names
    for text in rules:
        old, _ = _rename_rule(text)
        left = [name for name in rest if not old.fullmatch(name)]
        if len(left) == len(rest):
            hint = unknown_name(text.partition("=")[0], known)
            raise UsageError(f"--rename '{text}' matches nothing; {hint}")
        rest = left


def merge_contents(all_of: Sequence[tuple[str, Contents]]) -> Contents:
    """Several contents as one; raises where they share a name."""
    tensors: dict[Path, HeldTensor] = {}
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


def _rename_rule(rule: str) -> tuple[re.Pattern[str], list[str]]:
    old, equals, new = rule.partition("=")
    if not equals or not old or not new:
        raise UsageError(f"--rename '{rule}' should be OLD=NEW, as in 'model/*=*'")
    if new.count("*") > old.count("*"):
        raise UsageError(f"--rename '{rule}' has a * on the right that stands for nothing on the left")
    return compile_pattern(old), new.split("*")


def _replaced(state: Any, by_id: Mapping[int, HeldTensor]) -> Any:
    if isinstance(state, StoredTensor):
        return by_id[id(state)]
    if isinstance(state, dict):
        return {key: _replaced(inner, by_id) for key, inner in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_replaced(inner, by_id) for inner in state)
    return state


def refuse_objects(value: Any, path: Path) -> Any:
    """Raise for an object with a state dict, which a stored state cannot have."""
    raise CheckpointError(f"'{entry_name(path)}' is a {type(value).__name__}, which no checkpoint holds")


DIM_NAMES = {1: ("elements",), 2: ("rows", "columns")}  # by ndim


def layout_summary(layout: Layout) -> str:
    """A layout in a few words: ``whole``, ``4 chunks of rows``, ``2 × 4 grid``, ``7 boxes``."""
    count = len(layout.pattern.filled)
    if not count:
        return "empty"
    cut = [dim for dim in range(layout.ndim) if layout.cuts(dim)]
    if not cut:
        return "whole"
    if len(cut) == 1:
        known = DIM_NAMES.get(layout.ndim, ())
        what = known[cut[0]] if known else f"dim {cut[0]}"
        return f"{numbered(count, 'chunk')} of {what}"
    if isinstance(layout.pattern, Grid):
        boxes = layout.at(layout.pattern.filled)
        shape = [len(np.unique(boxes.offsets[:, dim])) for dim in cut]
        if np.prod(shape) == count:
            return f"{' × '.join(map(str, shape))} grid" + ("" if len(cut) == layout.ndim else f" of dims {cut}")
    return numbered(count, "box")


def bytes_by_file(index: Index, tensors: Sequence[StoredTensor]) -> tuple[list[int], list[int]]:
    """For each file, the bytes of these tensors in it, and the number of tensors."""
    held = np.zeros(max(len(index.files), 1), dtype=np.int64)
    counts = np.zeros_like(held)
    for tensor in tensors:
        files, volumes = tensor.layout.ranks, tensor.layout.pattern.all_volumes
        np.add.at(held, files, volumes * tensor.dtype.itemsize)
        counts[np.unique(files[volumes > 0])] += 1
    return held.tolist(), counts.tolist()
