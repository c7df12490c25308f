"""States built from leaves with paths, and from values that contain tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from shardwise.checkpoint.archive.formats.assembly import stored_in_memory
from shardwise.checkpoint.archive.state_tree import MAX_DEPTH, Path, entry_name
from shardwise.checkpoint.archive.stored import StoredTensor
from shardwise.errors import CheckpointError

MOST_NODES = 10_000_000  # in a value that was read; shared ones count at every reference


class TensorNames:
    """Unique names for tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, StoredTensor] = {}
        self._more: dict[str, int] = {}

    def free(self, path: Path) -> str:
        """A name for the tensor at this path that no tensor has yet."""
        name = wanted = entry_name(path)
        while name in self.tensors:
            self._more[wanted] = self._more.get(wanted, 1) + 1
            name = f"{wanted}#{self._more[wanted]}"
        return name

    def add(self, tensor: StoredTensor) -> StoredTensor:
        """Note a tensor under its name."""
        self.tensors[tensor.name] = tensor
        return tensor


class _Branch(dict[str | int, Any]):
    """A container under construction."""


def state_from_leaves(
    leaves: Iterable[tuple[Path, Any]], is_list: Callable[[Path], bool | None] = lambda path: None
) -> Any:
    """The state with these leaves.

    ``is_list`` says whether a container is a list; where it gives None, keys 0, 1, 2 … make a list. A list with missing
    numbers becomes a dict.
    """
    root: Any = _Branch()
    for path, leaf in leaves:
        if len(path) > MAX_DEPTH:
            raise CheckpointError(f"'{entry_name(path):.100}' is nested more than {MAX_DEPTH} deep")
        if not path:
            raise CheckpointError("an entry has no name")
        branch = root
        for key in path[:-1]:
            branch = branch.setdefault(key, _Branch())
            if not isinstance(branch, _Branch):
                raise CheckpointError(f"'{entry_name(path):.200}' is within an entry that is a leaf")
        if path[-1] in branch:
            raise CheckpointError(f"'{entry_name(path):.200}' is there twice")
        branch[path[-1]] = leaf
    return _finish(root, (), is_list)


def _finish(value: Any, path: Path, is_list: Callable[[Path], bool | None]) -> Any:
    if not isinstance(value, _Branch):
        return value
    finished = {key: _finish(inner, (*path, key), is_list) for key, inner in value.items()}
    if is_list(path) is False or not finished or not all(type(key) is int for key in finished):
        return finished
    numbers = range(len(finished))
    return [finished[key] for key in numbers] if set(finished) == set(numbers) else finished


def with_stored_tensors(value: Any, path: Path, names: TensorNames, *, nbytes: int) -> Any:
    """The value with a `StoredTensor` in the place of each tensor, and with plain dicts, lists and tuples.

    The value was read from ``nbytes`` bytes; larger tensors are refused, for they would expose uninitialised memory.
    """
    done: dict[int, tuple[Any, int]] = {}
    converted, _ = _converted(value, path, names, done, set())
    found = [
        tensor.locations[0] for tensor, _ in done.values() if isinstance(tensor, StoredTensor) and tensor.locations
    ]
    storages = [location.untyped_storage() for location in found if isinstance(location, torch.Tensor)]
    if sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()) > nbytes:
        raise CheckpointError(f"'{entry_name(path):.200}' is damaged: its tensors are larger than their file")
    return converted


def _converted(
    value: Any, path: Path, names: TensorNames, done: dict[int, tuple[Any, int]], above: set[int]
) -> tuple[Any, int]:
    if isinstance(value, torch.Tensor):
        if id(value) not in done:
            done[id(value)] = names.add(stored_in_memory(names.free(path), value)), 1
        return done[id(value)]
    if not isinstance(value, dict | list | tuple):
        return value, 1
    if id(value) in done:
        return done[id(value)]
    if id(value) in above or len(path) > MAX_DEPTH:
        raise CheckpointError(f"'{entry_name(path):.100}' contains itself, or is nested more than {MAX_DEPTH} deep")
    above.add(id(value))
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = [(key, _converted(inner, (*path, key), names, done, above)) for key, inner in items]
    above.discard(id(value))
    total = 1 + sum(count for _, (_, count) in found)
    if total > MOST_NODES:
        raise CheckpointError(f"'{entry_name(path):.100}' holds more than {MOST_NODES:,} values")
    made: Any
    if isinstance(value, dict):
        made = {key: inner for key, (inner, _) in found}
    else:
        made = [inner for _, (inner, _) in found]
        made = tuple(made) if isinstance(value, tuple) else made
    done[id(value)] = made, total
    return made, total
