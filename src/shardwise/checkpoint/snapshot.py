"""`Snapshot`: a state to be written, as one rank has it, and what the ranks must agree on."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise import settings
from shardwise.checkpoint.archive import state_tree
from shardwise.checkpoint.archive.state_json import encode_tree
from shardwise.checkpoint.archive.state_tree import Node, NodeKind
from shardwise.checkpoint.local import Local
from shardwise.checkpoint.optimizers import object_state
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.write_assignment import Source
from shardwise.comm.group import Fields
from shardwise.errors import RankMismatchError

Ties = list[list[int]]  # pairs of numbers of tensors, the later one first


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The tree of a state, and its tensors in order, each with its local boxes."""

    tree: Node
    paths: Sequence[state_tree.Path]
    nodes: Sequence[Node]
    locals: Sequence[Local]

    @staticmethod
    def of(state: Any, ranks: Ranks) -> Snapshot:
        """The snapshot of a state; raises a `CheckpointError` that names an entry that cannot be saved."""
        return Snapshot.of_tree(state_tree.parse_state(state, lambda owner, _: object_state(owner)), ranks)

    @staticmethod
    def of_tree(tree: Node, ranks: Ranks) -> Snapshot:
        """The snapshot of a parsed state."""
        found = [(path, node) for path, node in tree.walk() if node.kind is NodeKind.TENSOR]
        locals_ = [Local.of(state_tree.entry_name(path), node.value, ranks) for path, node in found]
        return Snapshot(tree, [path for path, _ in found], [node for _, node in found], locals_)

    def fields(self) -> dict[str, object]:
        """What must be the same on every rank: each entry, then the containers."""
        entries: dict[str, object] = {}
        containers: dict[str, object] = {}
        tensors = iter(self.locals)
        for path, node in self.tree.walk():
            name = repr(state_tree.entry_name(path))
            if node.kind is NodeKind.TENSOR:
                entries[name] = _description(next(tensors))
            elif node.kind is NodeKind.VALUE:
                entries[name] = f"{type(node.value).__name__} {encode_tree(node, lambda _: '')!r}"
            else:
                containers[f"{name} (as a whole)"] = f"a {node.kind.value} of {list(node.children)}"
        return {**entries, **containers}

    def checksums(self) -> list[int]:
        """The checksums of all plain tensors, which must be the same on every rank."""
        return [local.checksum() for local in self.locals if local.plain]

    def require_same_content(self, checksums: Sequence[Sequence[int]], ranks: Ranks, done: str = "saved") -> None:
        """Raise unless all ranks have the same checksums."""
        plain = [path for path, local in zip(self.paths, self.locals, strict=True) if local.plain]
        for path, first, *others in zip(plain, *checksums, strict=True):
            different = [rank for rank, other in zip(ranks.all[1:], others, strict=True) if other != first]
            if different:
                raise RankMismatchError(
                    f"'{state_tree.entry_name(path)}' is a plain tensor, and its content is not the same on rank "
                    f"{different[0]} as on rank {ranks.all[0]}; nothing was {done}. A plain tensor is one value for "
                    "all ranks: broadcast it, or if each rank has its own, make all of them one ShardedTensor, or give "
                    "them under a name for each rank that every rank has"
                )

    def ties(self) -> Ties:
        """The tensors that share their local memory with an earlier one."""
        first: dict[Any, int] = {}
        found = []
        for number, local in enumerate(self.locals):
            memory = local.memory()
            earlier = number if memory is None else first.setdefault((memory, local.layout), number)
            if earlier < number:
                found.append([number, earlier])
        return found

    def tie(self, ties_by_rank: Sequence[Ties], ranks: Ranks) -> list[int]:
        """For each tensor the first one that it is tied to (or itself), given the ties on each rank.

        Two tensors are tied if they are tied on every rank that holds any of their elements.
        """
        pairs = [{(later, earlier) for later, earlier in ties} for ties in ties_by_rank]
        first = list(range(len(self.locals)))
        for later, earlier in sorted(set().union(*pairs)):
            layout = self.locals[later].layout
            holders = ranks.all if self.locals[later].plain else layout.ranks[layout.boxes.filled].tolist()
            if all((later, earlier) in pairs[ranks.all.index(rank)] for rank in set(holders) & set(ranks.all)):
                first[later] = earlier
        return first

    def sources(self, first: Sequence[int]) -> dict[int, Source]:
        """The tensors to write, by number: all that are tied to no earlier one."""
        names: set[str] = set()
        found: dict[int, Source] = {}
        for number, (path, local) in enumerate(zip(self.paths, self.locals, strict=True)):
            if first[number] == number:
                name = state_tree.entry_name(path)
                while name in names:  # for keys 1 and "1", or slashes in keys
                    name += "'"
                names.add(name)
                found[number] = Source(name, local.dtype, local.layout.size, None if local.plain else local.layout)
        return found


def agree_on_state(state: Any, ranks: Ranks, prepare: Callable[[], Any]) -> tuple[Snapshot, list[int], Any]:
    """The state, the first tensor that each tensor is tied to, and what ``prepare`` gives on the first rank.

    Every rank calls this; raises on every rank unless all have the same state.
    """
    checks = settings.current().validate and len(ranks.all) > 1
    sums: list[int] = []

    def work() -> tuple[Snapshot, Fields, tuple[Any, Ties, int]]:
        snapshot = Snapshot.of(state, ranks)
        sums.extend(snapshot.checksums() if checks else [])
        return snapshot, snapshot.fields(), (prepare(), snapshot.ties(), zlib.crc32(repr(sums).encode()))

    snapshot, brought = ranks.in_step(work)
    if len({total for _, _, total in brought}) > 1:  # find out which tensor differs
        snapshot.require_same_content(ranks.in_step(lambda: (None, {}, sums))[1], ranks)
    return snapshot, snapshot.tie([ties for _, ties, _ in brought], ranks), brought[0][0]


def _description(local: Local) -> str:
    where = "plain" if local.plain else local.layout.outline
    return f"{local.dtype} of size {tuple(local.layout.size)}, {where}"
