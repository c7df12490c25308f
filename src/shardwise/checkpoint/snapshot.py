"""`Snapshot`: a state that is to be written, as one rank has it, and what the ranks must agree on."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise import settings
from shardwise.archive import nest
from shardwise.archive.nest import Kind, Node
from shardwise.archive.values import encode
from shardwise.checkpoint.local import Local
from shardwise.checkpoint.optimizers import content_of
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.sharing_out import Source
from shardwise.errors import RankMismatchError
from shardwise.process_group import Fields

Ties = list[list[int]]  # pairs of tensors by number, the later one first


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The tree of a state, and its tensors in order, each with what is here of it."""

    tree: Node
    paths: Sequence[nest.Path]
    nodes: Sequence[Node]
    locals: Sequence[Local]

    @staticmethod
    def of(state: Any, ranks: Ranks) -> Snapshot:
        """What a state is now, or a `CheckpointError` that names the entry that cannot be saved."""
        return Snapshot.of_tree(nest.parse(state, lambda owner, _: content_of(owner)), ranks)

    @staticmethod
    def of_tree(tree: Node, ranks: Ranks) -> Snapshot:
        """The same of a state whose objects have given their state dicts."""
        found = [(path, node) for path, node in tree.walk() if node.kind is Kind.TENSOR]
        locals_ = [Local.of(nest.name_of(path), node.own, ranks) for path, node in found]
        return Snapshot(tree, [path for path, _ in found], [node for _, node in found], locals_)

    def fields(self) -> dict[str, object]:
        """What must be the same on every rank: first each entry, then how they are nested."""
        entries: dict[str, object] = {}
        containers: dict[str, object] = {}
        tensors = iter(self.locals)
        for path, node in self.tree.walk():
            name = repr(nest.name_of(path))
            if node.kind is Kind.TENSOR:
                entries[name] = _description(next(tensors))
            elif node.kind is Kind.VALUE:
                entries[name] = f"{type(node.own).__name__} {encode(node, lambda _: '')!r}"
            else:
                containers[f"{name} (as a whole)"] = f"a {node.kind.value} of {list(node.children)}"
        return {**entries, **containers}

    def checksums(self) -> list[int]:
        """What the bytes of each plain tensor come to, which must be the same on every rank."""
        return [local.checksum() for local in self.locals if local.plain]

    def require_same_content(self, told: Sequence[Sequence[int]], ranks: Ranks, done: str = "saved") -> None:
        """Raise unless these checksums, as each rank has told them, are the same."""
        plain = [path for path, local in zip(self.paths, self.locals, strict=True) if local.plain]
        for path, first, *others in zip(plain, *told, strict=True):
            different = [rank for rank, other in zip(ranks.all[1:], others, strict=True) if other != first]
            if different:
                raise RankMismatchError(
                    f"'{nest.name_of(path)}' is a plain tensor, and its content is not the same on rank "
                    f"{different[0]} as on rank {ranks.all[0]}; nothing was {done}. A plain tensor is one value for "
                    "all ranks: broadcast it, or if each rank has its own, make all of them one ShardedTensor, or give "
                    "them under a name for each rank that every rank has"
                )

    def ties(self) -> Ties:
        """Tensors that have the same memory here as an earlier one."""
        first: dict[Any, int] = {}
        found = []
        for number, local in enumerate(self.locals):
            memory = local.memory()
            earlier = number if memory is None else first.setdefault((memory, local.layout), number)
            if earlier < number:
                found.append([number, earlier])
        return found

    def tie(self, said: Sequence[Ties], ranks: Ranks) -> list[int]:
        """For each tensor the first one that it is tied to, given what each rank said of its memory.

        Two are tied if every rank that holds anything of them says so; a rank without shards cannot know.
        """
        pairs = [{(later, earlier) for later, earlier in ties} for ties in said]
        first = list(range(len(self.locals)))
        for later, earlier in sorted(set().union(*pairs)):
            layout = self.locals[later].layout
            holders = ranks.all if self.locals[later].plain else layout.ranks[layout.boxes.filled].tolist()
            if all((later, earlier) in pairs[ranks.all.index(rank)] for rank in set(holders) & set(ranks.all)):
                first[later] = earlier
        return first

    def sources(self, first: Sequence[int]) -> dict[int, Source]:
        """The tensors to be written, by number: those that are tied to no earlier one."""
        names: set[str] = set()
        found: dict[int, Source] = {}
        for number, (path, local) in enumerate(zip(self.paths, self.locals, strict=True)):
            if first[number] == number:
                name = nest.name_of(path)
                while name in names:  # keys 1 and "1", or strokes in keys
                    name += "'"
                names.add(name)
                found[number] = Source(name, local.dtype, local.layout.size, None if local.plain else local.layout)
        return found


def agreed(state: Any, ranks: Ranks, prepare: Callable[[], Any]) -> tuple[Snapshot, list[int], Any]:
    """The state, if all ranks have the same; for each tensor the first one that it is tied to; and what the first rank
    brings from what is to be done when its state is known. Every rank calls it."""
    checks = settings.current().validate and len(ranks.all) > 1
    sums: list[int] = []

    def work() -> tuple[Snapshot, Fields, tuple[Any, Ties, int]]:
        snapshot = Snapshot.of(state, ranks)
        sums.extend(snapshot.checksums() if checks else [])
        return snapshot, snapshot.fields(), (prepare(), snapshot.ties(), zlib.crc32(repr(sums).encode()))

    snapshot, brought = ranks.in_step(work)
    if len({total for _, _, total in brought}) > 1:  # now it is worth to tell all of them
        snapshot.require_same_content(ranks.in_step(lambda: (None, {}, sums))[1], ranks)
    return snapshot, snapshot.tie([ties for _, ties, _ in brought], ranks), brought[0][0]


def _description(local: Local) -> str:
    where = "plain" if local.plain else local.layout.outline
    return f"{local.dtype} of size {tuple(local.layout.size)}, {where}"
