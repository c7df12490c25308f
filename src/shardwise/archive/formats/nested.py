"""States put together: from paths and leaves, and from values that were read with tensors in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from shardwise.archive.formats.assembly import in_memory
from shardwise.archive.nest import MOST_DEEP, Path, name_of
from shardwise.archive.stored import StoredTensor
from shardwise.errors import CheckpointError

MOST_NODES = 10_000_000  # of values that are read, each counted wherever it is referred to


class Names:
    """Names of tensors, each given once."""

    def __init__(self) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self._more: dict[str, int] = {}

    def free(self, path: Path) -> str:
        """A name that no tensor has yet."""
        name = wanted = name_of(path)
        while name in self.tensors:
            self._more[wanted] = self._more.get(wanted, 1) + 1
            name = f"{wanted}#{self._more[wanted]}"
        return name

    def add(self, tensor: StoredTensor) -> StoredTensor:
        """Note a tensor under its name."""
        self.tensors[tensor.name] = tensor
        return tensor


class _Branch(dict[str | int, Any]):
    """A container that is being put together."""


def nested(leaves: Iterable[tuple[Path, Any]], is_list: Callable[[Path], bool | None] = lambda path: None) -> Any:
    """The state with these leaves. A container is a list if ``is_list`` says so.

    Where it does not know, keys 0, 1, 2 … make a list. A list of which some numbers are missing is a dict.
    """
    root: Any = _Branch()
    for path, leaf in leaves:
        if len(path) > MOST_DEEP:
            raise CheckpointError(f"'{name_of(path):.100}' is nested more than {MOST_DEEP} deep")
        if not path:
            raise CheckpointError("an entry has no name")
        branch = root
        for key in path[:-1]:
            branch = branch.setdefault(key, _Branch())
            if not isinstance(branch, _Branch):
                raise CheckpointError(f"'{name_of(path):.200}' is within an entry that is a leaf")
        if path[-1] in branch:
            raise CheckpointError(f"'{name_of(path):.200}' is there twice")
        branch[path[-1]] = leaf
    return _grown(root, (), is_list)


def _grown(value: Any, path: Path, is_list: Callable[[Path], bool | None]) -> Any:
    if not isinstance(value, _Branch):
        return value
    grown = {key: _grown(inner, (*path, key), is_list) for key, inner in value.items()}
    if is_list(path) is False or not grown or not all(type(key) is int for key in grown):
        return grown
    return [grown[key] for key in range(len(grown))] if set(grown) == set(range(len(grown))) else grown


def with_stored(value: Any, path: Path, names: Names, *, nbytes: int) -> Any:
    """A value that was read, with a `StoredTensor` in the place of each tensor; dicts, lists and tuples are plain.

    It was read from so many bytes. A tensor that says it has more would show memory that nobody has written.
    """
    done: dict[int, tuple[Any, int]] = {}
    converted, _ = _converted(value, path, names, done, set())
    found = [tensor.spots[0] for tensor, _ in done.values() if isinstance(tensor, StoredTensor) and tensor.spots]
    storages = [spot.untyped_storage() for spot in found if isinstance(spot, torch.Tensor)]
    if sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()) > nbytes:
        raise CheckpointError(f"'{name_of(path):.200}' is damaged: its tensors are larger than their file")
    return converted


def _converted(
    value: Any, path: Path, names: Names, done: dict[int, tuple[Any, int]], above: set[int]
) -> tuple[Any, int]:
    if isinstance(value, torch.Tensor):
        if id(value) not in done:
            done[id(value)] = names.add(in_memory(names.free(path), value)), 1
        return done[id(value)]
    if not isinstance(value, dict | list | tuple):
        return value, 1
    if id(value) in done:
        return done[id(value)]
    if id(value) in above or len(path) > MOST_DEEP:
        raise CheckpointError(f"'{name_of(path):.100}' contains itself, or is nested more than {MOST_DEEP} deep")
    above.add(id(value))
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = [(key, _converted(inner, (*path, key), names, done, above)) for key, inner in items]
    above.discard(id(value))
    total = 1 + sum(count for _, (_, count) in found)
    if total > MOST_NODES:
        raise CheckpointError(f"'{name_of(path):.100}' holds more than {MOST_NODES:,} values")
    made: Any
    if isinstance(value, dict):
        made = {key: inner for key, (inner, _) in found}
    else:
        made = [inner for _, (inner, _) in found]
        made = tuple(made) if isinstance(value, tuple) else made
    done[id(value)] = made, total
    return made, total
