"""A state as a tree: nested dicts, lists, tuples and objects with a state dict, and at the ends tensors and values.

What is to be saved, what is to be loaded into and what a checkpoint holds are all such trees.
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
MOST_DEEP = 100  # containers in each other; what reads and writes them calls itself for each
PLAIN = (bool, int, float, complex, str, bytes, bytearray, type(None))


class Kind(enum.Enum):
    """What a node of the tree is."""

    DICT = "dict"
    LIST = "list"
    TUPLE = "tuple"
    OBJECT = "object"  # its only child, under no name, is its state dict
    TENSOR = "tensor"
    VALUE = "value"


@dataclass(frozen=True, eq=False)
class Node:
    """One node: the caller's own object, and what is in it."""

    kind: Kind
    own: Any
    children: Mapping[Key, Node] = field(default_factory=dict)

    @property
    def content(self) -> Node:
        """The node itself; for an object, its state dict."""
        return self.children[0].content if self.kind is Kind.OBJECT else self

    def is_value(self) -> bool:
        """Whether it is plain values through and through, which can be replaced as a whole."""
        if self.kind in (Kind.TENSOR, Kind.OBJECT):
            return False
        return all(child.is_value() for child in self.children.values())

    def at(self, path: Path) -> Node | None:
        """The node that these keys lead to, if there is one."""
        node: Node | None = self.content
        for key in path:
            node = None if node is None else node.children.get(key)
        return node

    def walk(self, path: Path = ()) -> Iterator[tuple[Path, Node]]:
        """Every node in it, each with the keys that lead to it; an object as its state dict."""
        node = self.content
        yield path, node
        for key, child in node.children.items():
            yield from child.walk((*path, key))

    def objects(self) -> Iterator[Any]:
        """Every object with a state dict in it, and in the state dicts of those."""
        if self.kind is Kind.OBJECT:
            yield self.own
        for child in self.children.values():
            yield from child.objects()


def name_of(path: Path) -> str:
    """How messages speak of an entry: its keys, with strokes between them."""
    return "/".join(map(str, path)) or "state"


def is_stateful(value: object) -> bool:
    """Whether an object gives and takes a state dict, as modules and optimizers do."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


Content = Callable[[Any, Path], Any]  # the state dict of an object at this path


def parse(state: Any, content: Content, *, tensors: tuple[type, ...] = (torch.Tensor,)) -> Node:
    """The tree of a state, or a `CheckpointError` that names the entry that cannot be in one."""
    return _parse(state, (), content, tensors, [])


def _parse(value: Any, path: Path, content: Content, tensors: tuple[type, ...], above: list[int]) -> Node:
    if isinstance(value, tensors):
        return Node(Kind.TENSOR, value)
    if type(value) in PLAIN:
        return Node(Kind.VALUE, value)
    if id(value) in above:
        raise CheckpointError(f"'{name_of(path)}' contains itself")
    if len(above) >= MOST_DEEP:
        raise CheckpointError(f"'{name_of(path):.100}…' is nested deeper than {MOST_DEEP}")
    above = [*above, id(value)]
    if isinstance(value, dict):
        for key in value:
            if type(key) not in (str, int):
                raise CheckpointError(
                    f"'{name_of(path)}' has a key {key!r:.100} of type {type(key).__name__}; keys are str or int"
                )
        items: Iterator[tuple[Key, Any]] = iter(value.items())
        kind = Kind.DICT
    elif isinstance(value, list | tuple):
        items = iter(enumerate(value))
        kind = Kind.LIST if isinstance(value, list) else Kind.TUPLE
    elif is_stateful(value):
        return Node(Kind.OBJECT, value, {0: _parse(content(value, path), path, content, tensors, above)})
    else:
        raise CheckpointError(
            f"'{name_of(path)}' is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot "
            "hold: give tensors, numbers, strings, bytes, None, dicts, lists and tuples of those, and objects with "
            "state_dict() and load_state_dict()"
        )
    found = dict(items)
    inner = {
        key: _parse(found[key], (*path, key), content, tensors, above)
        for key in sorted(found, key=lambda key: (type(key) is int, key))  # to ask an object may be collective
    }
    return Node(kind, value, {key: inner[key] for key in found})
