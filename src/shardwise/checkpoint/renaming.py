"""Parts of a checkpoint, under other names than it was saved with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from shardwise.archive import nest
from shardwise.archive.nest import Kind, Node, name_of
from shardwise.checkpoint.optimizers import content_of
from shardwise.errors import CheckpointError
from shardwise.named_patterns import Rename, pattern_of, renamer

Only = str | Sequence[str] | None  # patterns of names


class _Entry(NamedTuple):
    """What a checkpoint has under a name that it gets: a leaf, or a container of which all is asked for."""

    node: Node
    path: nest.Path  # where it was


def as_named(stored: Node, state: Any, only: Only, rename: Rename) -> Node:
    """What a checkpoint holds, in the form of the state: entries that are asked for, under the names that they get."""
    if only is None and rename is None:
        return stored
    known = [name_of(path) for path, node in stored.walk() if not node.children]
    wanted, renamed = _picker(known, only), renamer(rename)
    entries = dict[str, _Entry]()
    for name, entry in _entries(stored, (), wanted, renamed):
        if name in entries:
            raise CheckpointError(f"two entries of the checkpoint would be '{name}': rename one of them otherwise")
        entries[name] = entry
    used: set[str] = set()
    made = _in_form_of(nest.parse(state, lambda owner, _: content_of(owner)), (), entries, used)
    others: dict[nest.Key, Node] = {name: entry.node for name, entry in entries.items() if name not in used}
    if made is not None and (made.kind is not Kind.DICT or not others):
        return made
    return _dict({**({} if made is None else made.children), **others})


def _entries(
    node: Node, path: nest.Path, wanted: Callable[[str], bool], renamed: Callable[[str], str]
) -> list[tuple[str, _Entry]]:
    """What is asked for of a node. It is one entry where that is all of it and the names in it stay as they are, so
    that lists and the states of optimizers stay what they are."""
    if not node.children:
        name = name_of(path)
        return [(renamed(name), _Entry(node, path))] if wanted(name) else []
    found, prefixes = list[tuple[str, _Entry]](), set[str]()
    for key, child in node.children.items():
        inner = _entries(child, (*path, key), wanted, renamed)
        is_whole = len(inner) == 1 and inner[0][1].node is child and inner[0][0].endswith(f"/{key}")
        prefixes.add(inner[0][0].removesuffix(f"/{key}") if is_whole else "")
        found += inner
    if len(prefixes) == 1 and path and (prefix := next(iter(prefixes))):
        return [(prefix, _Entry(node, path))]
    return found


def _in_form_of(target: Node, path: nest.Path, entries: Mapping[str, _Entry], used: set[str]) -> Node | None:
    """The entries whose names a state has, nested as they are there; None where there are none."""
    target, name = target.content, name_of(path)
    if name in entries:
        used.add(name)
        return entries[name].node
    inner = {key: _in_form_of(child, (*path, key), entries, used) for key, child in target.children.items()}
    found = {key: child for key, child in inner.items() if child is not None}
    if target.kind is Kind.DICT:
        found |= _beyond(target, path, entries, used)
        return _dict(found) if found else None
    if not found:
        return None
    if len(found) < len(target.children):
        raise CheckpointError(f"only a part of '{name}' is asked for: a list is loaded whole or not at all")
    return Node(target.kind, [child.own for child in found.values()], found)


def _beyond(target: Node, path: nest.Path, entries: Mapping[str, _Entry], used: set[str]) -> dict[nest.Key, Node]:
    """Entries below a dict that it does not have yet, as those of an optimizer before its first step."""
    if not path:
        return {}
    prefix, found = name_of(path) + "/", dict[nest.Key, Any]()
    for name, entry in entries.items():
        if not name.startswith(prefix) or name in used:
            continue
        keys: nest.Path = tuple(name.removeprefix(prefix).split("/"))
        if name == name_of(entry.path) and name_of(entry.path[: len(path)]) == name_of(path):
            keys = entry.path[len(path) :]  # which may be numbers
        if keys[0] not in target.children:
            used.add(name)
            inner = found
            for key in keys[:-1]:
                inner = inner.setdefault(key, {})
            inner[keys[-1]] = entry.node
    return {key: _nested(value) for key, value in found.items()}


def _nested(value: Any) -> Node:
    return value if isinstance(value, Node) else _dict({key: _nested(each) for key, each in value.items()})


def _dict(children: Mapping[nest.Key, Node]) -> Node:
    return Node(Kind.DICT, {key: node.own for key, node in children.items()}, children)


def _picker(names: Sequence[str], only: Only) -> Callable[[str], bool]:
    """Whether a name is asked for. Each pattern must match one."""
    if only is None:
        return lambda _: True
    given: object = [only] if isinstance(only, str) else only
    if not isinstance(given, Sequence | Set) or not all(isinstance(one, str) for one in given):
        raise CheckpointError(f"only takes a pattern of names, or several; found {only!r}")
    found = {one: set(filter(pattern_of(one).fullmatch, names)) for one in given}
    vain = [one for one, matched in found.items() if not matched]
    if vain or not found:
        sought = " or ".join(map(repr, vain)) or repr(only)
        raise CheckpointError(f"nothing in the checkpoint has a name like {sought}")
    return set[str]().union(*found.values()).__contains__
