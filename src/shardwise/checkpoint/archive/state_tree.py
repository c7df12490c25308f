"""A state as a tree: dicts, lists, tuples and objects with a state dict, whose leaves are tensors and plain values.

The state to save, the state to load into and the content of a checkpoint are such trees.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.errors import CheckpointError

Key = str | int
Path = tuple[Key, ...]
MAX_DEPTH = 100  # of nested containers; reading and writing are recursive
PLAIN = (bool, int, float, complex, str, bytes, bytearray, type(None))


class NodeKind(enum.Enum):
    """The type of a node."""

    DICT = "dict"
    LIST = "list"
    TUPLE = "tuple"
    OBJECT = "object"  # its only child is its state dict, and adds no key to paths
    TENSOR = "tensor"
    VALUE = "value"


@dataclass(frozen=True, eq=False)
class Node:
    """One node: the caller's own object, and its children."""

    kind: NodeKind
    value: Any
    children: Mapping[Key, Node] = field(default_factory=dict)

    @property
    def content(self) -> Node:
        """The node itself; for an object, its state dict."""
        return self.children[0].content if self.kind is NodeKind.OBJECT else self

    def is_value(self) -> bool:
        """Whether the node holds only plain values, so that it can be replaced as a whole."""
        if self.kind in (NodeKind.TENSOR, NodeKind.OBJECT):
            return False
        return all(child.is_value() for child in self.children.values())

    def at(self, path: Path) -> Node | None:
        """The node at this path, if there is one."""
        node: Node | None = self.content
        for key in path:
            node = None if node is None else node.children.get(key)
        return node

    def walk(self, path: Path = ()) -> Iterator[tuple[Path, Node]]:
        """Every node with its path; objects as their state dicts."""
        node = self.content
        yield path, node
        for key, child in node.children.items():
            yield from child.walk((*path, key))

    def objects(self) -> Iterator[Any]:
        """Every object with a state dict, also within other objects' state dicts."""
        if self.kind is NodeKind.OBJECT:
            yield self.value
        for child in self.children.values():
            yield from child.objects()


def entry_name(path: Path) -> str:
    """The name of an entry in messages: its keys, with slashes between them."""
    return "/".join(map(str, path)) or "state"


def is_stateful(value: object) -> bool:
    """Whether an object has a state dict, as modules and optimizers do."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


Content = Callable[[Any, Path], Any]  # the state dict of an object at this path


def parse_state(state: Any, content: Content, *, tensors: tuple[type, ...] = (torch.Tensor,)) -> Node:
    """The tree of a state; raises a `CheckpointError` that names an entry of another type."""
    return _parse(state, (), content, tensors, [])


def _parse(value: Any, path: Path, content: Content, tensors: tuple[type, ...], above: list[int]) -> Node:
    if isinstance(value, tensors):
        return Node(NodeKind.TENSOR, value)
    if type(value) in PLAIN:
        return Node(NodeKind.VALUE, value)
    if id(value) in above:
        raise CheckpointError(f"'{entry_name(path)}' contains itself")
    if len(above) >= MAX_DEPTH:
        raise CheckpointError(f"'{entry_name(path):.100}…' is nested deeper than {MAX_DEPTH}")
    above = [*above, id(value)]
    if isinstance(value, dict):
        for key in value:
            if type(key) not in (str, int):
                raise CheckpointError(
                    f"'{entry_name(path)}' has a key {key!r:.100} of type {type(key).__name__}; keys are str or int"
                )
        items: Iterator[tuple[Key, Any]] = iter(value.items())
        kind = NodeKind.DICT
    elif isinstance(value, list | tuple):
        items = iter(enumerate(value))
        kind = NodeKind.LIST if isinstance(value, list) else NodeKind.TUPLE
    elif is_stateful(value):
        return Node(NodeKind.OBJECT, value, {0: _parse(content(value, path), path, content, tensors, above)})
    else:
        raise CheckpointError(
            f"'{entry_name(path)}' is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot "
            "hold: give tensors, numbers, strings, bytes, None, dicts, lists and tuples of those, and objects with "
            "state_dict() and load_state_dict()"
        )
    found = dict(items)
    inner = {
        key: _parse(found[key], (*path, key), content, tensors, above)
        for key in sorted(
            found, key=lambda key: (type(key) is int, key)
        )  # the same order on all ranks: state_dict() may be collective
    }
    return Node(kind, value, {key: inner[key] for key in found})
