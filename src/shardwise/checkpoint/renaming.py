"""Part of a checkpoint, or its entries under other names: `load` with ``only`` and ``rename``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

from shardwise.checkpoint.archive import state_tree
from shardwise.checkpoint.archive.state_tree import Node, NodeKind, entry_name
from shardwise.checkpoint.name_patterns import Rename, compile_pattern, renamer
from shardwise.checkpoint.optimizers import object_state
from shardwise.errors import CheckpointError

Only = str | Sequence[str] | None  # patterns of names


class _Entry(NamedTuple):
    """An entry of a checkpoint that is loaded: a leaf, or a container that is loaded whole."""

    node: Node
    path: state_tree.Path  # in the checkpoint


def select_and_rename(stored: Node, state: Any, only: Only, rename: Rename) -> Node:
    """The selected entries of a checkpoint under their new names, nested like the state."""
    if only is None and rename is None:
        return stored
    known = [entry_name(path) for path, node in stored.walk() if not node.children]
    is_selected, renamed = _selector(known, only), renamer(rename)
    entries = dict[str, _Entry]()
    for name, entry in _entries(stored, (), is_selected, renamed):
        if name in entries:
            raise CheckpointError(f"two entries of the checkpoint would be '{name}': rename one of them otherwise")
        entries[name] = entry
    used: set[str] = set()
    made = _in_form_of(state_tree.parse_state(state, lambda owner, _: object_state(owner)), (), entries, used)
    others: dict[state_tree.Key, Node] = {name: entry.node for name, entry in entries.items() if name not in used}
    if made is not None and (made.kind is not NodeKind.DICT or not others):
        return made
    return _dict({**({} if made is None else made.children), **others})


def _entries(
    node: Node, path: state_tree.Path, is_selected: Callable[[str], bool], renamed: Callable[[str], str]
) -> list[tuple[str, _Entry]]:
    """The selected entries in a node, with their new names.

    A node that is selected whole, without renames below it, is one entry, so that lists stay whole.
    """
    if not node.children:
        name = entry_name(path)
        return [(renamed(name), _Entry(node, path))] if is_selected(name) else []
    found, prefixes = list[tuple[str, _Entry]](), set[str]()
    for key, child in node.children.items():
        inner = _entries(child, (*path, key), is_selected, renamed)
        is_whole = len(inner) == 1 and inner[0][1].node is child and inner[0][0].endswith(f"/{key}")
        prefixes.add(inner[0][0].removesuffix(f"/{key}") if is_whole else "")
        found += inner
    if len(prefixes) == 1 and path and (prefix := next(iter(prefixes))):
        return [(prefix, _Entry(node, path))]
    return found


def _in_form_of(target: Node, path: state_tree.Path, entries: Mapping[str, _Entry], used: set[str]) -> Node | None:
    """The entries whose names the state has, nested like the state; None where there are none."""
    target, name = target.content, entry_name(path)
    if name in entries:
        used.add(name)
        return entries[name].node
    inner = {key: _in_form_of(child, (*path, key), entries, used) for key, child in target.children.items()}
    found = {key: child for key, child in inner.items() if child is not None}
    if target.kind is NodeKind.DICT:
        found |= _new_entries(target, path, entries, used)
        return _dict(found) if found else None
    if not found:
        return None
    if len(found) < len(target.children):
        raise CheckpointError(f"only a part of '{name}' is asked for: a list is loaded whole or not at all")
    return Node(target.kind, [child.value for child in found.values()], found)


def _new_entries(
    target: Node, path: state_tree.Path, entries: Mapping[str, _Entry], used: set[str]
) -> dict[state_tree.Key, Node]:
    """Entries below a dict that the dict does not have yet, such as an optimizer's before its first step."""
    if not path:
        return {}
    prefix, found = entry_name(path) + "/", dict[state_tree.Key, Any]()
    for name, entry in entries.items():
        if not name.startswith(prefix) or name in used:
            continue
        keys: state_tree.Path = tuple(name.removeprefix(prefix).split("/"))
        if name == entry_name(entry.path) and entry_name(entry.path[: len(path)]) == entry_name(path):
            keys = entry.path[len(path) :]  # the original keys, which may be numbers
        if keys[0] not in target.children:
            used.add(name)
            inner = found
            for key in keys[:-1]:
                inner = inner.setdefault(key, {})
            inner[keys[-1]] = entry.node
    return {key: _nested(value) for key, value in found.items()}


def _nested(value: Any) -> Node:
    return value if isinstance(value, Node) else _dict({key: _nested(each) for key, each in value.items()})


def _dict(children: Mapping[state_tree.Key, Node]) -> Node:
    return Node(NodeKind.DICT, {key: node.value for key, node in children.items()}, children)


def _selector(names: Sequence[str], only: Only) -> Callable[[str], bool]:
    """A function that says whether a name is selected. Each pattern must match a name."""
    if only is None:
        return lambda _: True
    given: object = [only] if isinstance(only, str) else only
    if not isinstance(given, Sequence | Set) or not all(isinstance(one, str) for one in given):
        raise CheckpointError(f"only takes a pattern of names, or several; found {only!r}")
    found = {one: set(filter(compile_pattern(one).fullmatch, names)) for one in given}
    unmatched = [one for one, matched in found.items() if not matched]
    if unmatched or not found:
        sought = " or ".join(map(repr, unmatched)) or repr(only)
        raise CheckpointError(f"nothing in the checkpoint has a name like {sought}")
    return set[str]().union(*found.values()).__contains__
