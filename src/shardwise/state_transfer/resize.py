"""`resize`: a live training goes on with fewer ranks, or more, without the disk."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from shardwise import settings
from shardwise.checkpoint.archive import StoredTensor, state_tree
from shardwise.checkpoint.archive.state_json import decode_tree, encode_tree
from shardwise.checkpoint.archive.state_tree import Node, NodeKind
from shardwise.checkpoint.archive.stored import dtype_from_name, dtype_name, whole_on_rank
from shardwise.checkpoint.local import Local, rank_in_layout
from shardwise.checkpoint.matching import (
    Match,
    apply_values,
    count_objects,
    match_state,
    objects_without_state,
    require_module_data,
)
from shardwise.checkpoint.optimizers import object_state
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.snapshot import Snapshot
from shardwise.comm.agreement import in_step_telling
from shardwise.comm.group import Fields
from shardwise.comm.peers import is_known, mark_known
from shardwise.errors import ProcessGroupError, RankMismatchError, StateMismatchError, TransferError
from shardwise.nn.optim import ShardedOptimizer
from shardwise.nn.optim.state import Work
from shardwise.state_transfer.expression import Take
from shardwise.state_transfer.lost import Survivors, require_held, surviving
from shardwise.state_transfer.sides import Given
from shardwise.state_transfer.transfer import MAX_BYTES, StateTransfer
from shardwise.tensor import ShardedTensorBase


def resize(
    old_state: Any,
    new_state: Any,
    *,
    lost: Iterable[int] = (),
    max_bytes: int = MAX_BYTES,
    process_group: ProcessGroup | None = None,
) -> Any:
    """Move a live training from the ranks that have it to those that shall go on with it; gives the new state.

    Every rank of the group calls it, by default of the default group: all that have the old state and all that are to
    have the new one. A rank gives None for the one that it has no part in. Both have the form that `shardwise.save`
    takes, the same names in each: modules, optimizers, schedulers, tensors, plain values. The new one is made for the
    new ranks, in whatever layouts; its tensors have memory, and their values do not matter. Optimizers need not have
    stepped, neither the old ones nor the new.

    All tensors move by one `StateTransfer`: each element once to each rank that wants it and has it not. Plain values
    and the rest of each state dict go as words from the lowest rank that has the old state. Gradients stay behind. The
    old state is only read, so that it and the new one are in memory at the same time; a plain tensor may be in both.

    ``lost`` are ranks that are gone. They do not call it, and the group is one without them; ``dist.new_group(ranks,
    use_local_synchronization=True)`` makes one that the dead need not join. What a lost rank held comes from replicas
    on other ranks. Where there are none, every rank raises a `StateLostError` that lists what is lost.

    The ranks may have been numbered anew since the old state was made: processes that leave one world by
    ``dist.destroy_process_group()`` and join another, with others that were started later, keep their sharded tensors,
    and by these they are known. ``lost`` has the numbers of then.

    All checks come before the first change, and every rank raises the same. If a rank is lost while tensors move, every
    other one raises a `TransferError` soon: the new state is partly filled, and the old one is as it was, so that a new
    group without that rank can begin again with ``lost``::

        >>> model = shardwise.shard_module(torch.nn.Linear(4, 4), {"weight": 0})  # on all ranks
        >>> fewer = shardwise.shard_module(torch.nn.Linear(4, 4), {"weight": 1})  # on those that stay
        >>> shardwise.resize({"model": model, "step": 7}, {"model": fewer, "step": 0})["step"]
        7
        >>> torch.equal(fewer.weight.full_tensor(), model.weight.full_tensor())
        True
    """
    return _Resize(old_state, new_state, Ranks.of(process_group, "resize"), lost).run(max_bytes)


class _Old(NamedTuple):
    """What a rank knows of the old state, if it has it."""

    snapshot: Snapshot
    number: int  # the rank that this process is in its layouts, or a number that no rank has in them
    sums: list[int]  # of its plain tensors


class _Resize:
    """The steps, each of which all ranks take; one without the old or the new state has no part in some, and waits."""

    def __init__(self, old_state: Any, new_state: Any, ranks: Ranks, lost: Iterable[int]) -> None:
        self._old_state, self._new_state, self._ranks, self._gone = old_state, new_state, ranks, lost

    def run(self, max_bytes: int) -> Any:
        """All of it."""
        self._attend(max_bytes)
        sources, words = self._tell(*self._look())
        stored = self._stored(words)
        target, targets, recipe, objects = self._fit(stored)
        survivors = Survivors.of(self._numbers)
        transfer = StateTransfer(
            {name: _given(local, survivors) for name, local in sources.items()},
            targets,
            recipe=recipe,
            max_bytes=max_bytes,
            process_group=self._ranks.group,
        )
        try:
            transfer.run()
            self._together(_nothing)  # a rank that has all of it may not have met one that is gone
            if target is None:
                for _ in range(objects):
                    self._together(_nothing)
                return None
            return apply_values(target, stored, self._together)
        except TransferError as error:
            raise _broken_off(error, self._ranks) from error

    # Who, and what they have ----------------------------------------------------------------------------------------

    def _attend(self, max_bytes: int) -> None:
        """Find out which ranks have the old state, and which are to have the new one."""

        def attend() -> tuple[None, Fields, list[bool]]:
            self._lost = _ranks_of(self._gone)
            fields = {"verb": "resize", "lost": self._lost, "max_bytes": max_bytes}
            return None, fields, [self._old_state is not None, self._new_state is not None]

        _, told = self._ranks.in_step(attend)
        self._old, self._new = (
            tuple(rank for rank, has in zip(self._ranks.all, told, strict=True) if has[which]) for which in (0, 1)
        )
        for which, ranks in (("old_state", self._old), ("new_state", self._new)):
            if not ranks:
                raise StateMismatchError(f"every rank gives None for {which}: give it on the ranks that have it")

    def _look(self) -> tuple[_Old | None, list[Any]]:
        """The old state, if all ranks that have it have the same; and which of its tensors each says are tied.

        From then on it is known which rank is which of its layouts.
        """

        def content(owner: Any) -> Any:
            ours = type(owner).state_dict is ShardedOptimizer.state_dict
            return owner.state_dict_where_it_lies(self._share) if ours else object_state(owner)

        fields: dict[str, object] = {}

        def look() -> tuple[_Old | None, Fields, Any]:
            if self._old_state is None:
                return None, {}, None
            tree = state_tree.parse_state(self._old_state, lambda owner, _: content(owner))
            number = self._number_in(tree)
            snapshot = Snapshot.of_tree(tree, replace(self._ranks, here=number))
            fields.update(snapshot.fields())
            sums = snapshot.checksums() if settings.current().validate else []
            said = hashlib.blake2b(json.dumps(list(fields.items())).encode(), digest_size=16).hexdigest()
            return _Old(snapshot, number, sums), {}, [said, snapshot.ties(), zlib.crc32(repr(sums).encode()), number]

        old, told = self._ranks.in_step(look)
        while self._is_asked(told):
            old, told = self._ranks.in_step(look)
        known = [one for one in told if one is not None]
        if len({said for said, *_ in known}) > 1:  # now it is worth to tell all of it
            raise self._difference(self._told_by_old(fields))
        self._numbers = self._numbered([number for *_, number in known])
        if len({total for _, _, total, _ in known}) > 1:
            sums = self._told_by_old([] if old is None else old.sums)

            def compare() -> tuple[None, Fields, None]:
                if old is not None:
                    old.snapshot.require_same_content(sums, replace(self._ranks, all=self._old), "moved")
                return None, {}, None

            self._ranks.in_step(compare)
        return old, [ties for _, ties, *_ in known]

    def _number_in(self, tree: Node) -> int:
        """Which rank this process is in the layouts of the old state. If it has no box, a number that none has there,
        and another one on each rank; a process alone is not asked."""
        if self._ranks.group is None:
            return self._ranks.here
        tensors = [
            (state_tree.entry_name(path), node.value) for path, node in tree.walk() if node.kind is NodeKind.TENSOR
        ]
        for name, tensor in tensors:
            found = rank_in_layout(name, tensor)
            if found is not None:
                return found
        layouts = [tensor.sharding for _, tensor in tensors if isinstance(tensor, ShardedTensorBase)]
        known = [int(layout.ranks.max()) for layout in layouts if len(layout)]
        return max([*known, *self._lost, *self._ranks.all]) + 1 + self._ranks.all.index(self._ranks.here)

    def _numbered(self, numbers: Sequence[int]) -> dict[int, int]:
        """For each rank of the layouts of the old state the one that it is now."""
        found: dict[int, int] = {}
        for rank, number in zip(self._old, numbers, strict=True):
            if number in found:
                raise ProcessGroupError(
                    f"ranks {found[number]} and {rank} both have the boxes of rank {number} of the old state: nothing "
                    "was moved"
                )
            if number in self._lost:
                raise ProcessGroupError(
                    f"rank {number} is given as lost, and is in the group: give a group of the ranks that are left"
                )
            found[number] = rank
        return found

    def _share(self, work: Work) -> tuple[Any, list[Any]]:
        """What the ranks that have the old state tell each other of an optimizer's state. Its own group may have lost
        ranks; so all meet in this one, and those that have no old state look once more."""

        def asked() -> tuple[Any, Fields, list[Any]]:
            value, _, told = work()
            return value, {}, [None, told]

        value, told = self._ranks.in_step(asked)
        self._is_asked(told)
        return value, [one[1] for one in told if one is not None]

    def _is_asked(self, told: Sequence[Any]) -> bool:
        """Whether ranks have met because of an optimizer: all that have the old state, or none of them."""
        asking = [one[0] is None for one in told if one is not None]
        if len(set(asking)) > 1:
            at = self._old[asking.index(not asking[0])]
            error = RankMismatchError(
                f"the old state has not as many optimizers on rank {at} as on rank {self._old[0]}; nothing was moved"
            )
            raise mark_known(error, self._ranks.all)
        return asking[0]

    def _told_by_old(self, words: Any) -> list[Any]:
        _, told = self._ranks.in_step(lambda: (None, {}, words))
        return [one for rank, one in zip(self._ranks.all, told, strict=True) if rank in self._old]

    def _difference(self, told: Sequence[dict[str, str]]) -> RankMismatchError:
        """The first entry that two ranks do not have alike."""
        first = told[0]
        for rank, other in zip(self._old, told, strict=True):
            for name in dict.fromkeys([*first, *other]):
                mine, theirs = first.get(name, "not there"), other.get(name, "not there")
                if mine != theirs:
                    return RankMismatchError(
                        f"the old state is not the same on all ranks; nothing was moved: {name} is {mine} on rank "
                        f"{self._old[0]}, and {theirs} on rank {rank}"
                    )
        return RankMismatchError("the old state has the same entries on all ranks, but not in the same order")

    # From the old to the new ----------------------------------------------------------------------------------------

    def _tell(self, old: _Old | None, ties: list[Any]) -> tuple[dict[str, Local], Any]:
        """The tensors that are here of the old state, by the names under which they travel; and all else, in words."""

        def tell() -> tuple[dict[str, Local], Fields, bytes]:
            if old is None:
                return {}, {}, b""
            snapshot = old.snapshot
            first = snapshot.tie(ties, replace(self._ranks, here=old.number, all=tuple(self._numbers)))
            names = _names(state_tree.entry_name(path) for path in snapshot.paths)
            sources = {names[number]: snapshot.locals[number] for number in dict.fromkeys(first)}
            require_held(sources, tuple(self._numbers), self._lost)
            if self._ranks.here != self._old[0]:
                return sources, {}, b""
            known = {node: names[number] for node, number in zip(snapshot.nodes, first, strict=True)}
            tensors = {name: [dtype_name(local.dtype), list(local.layout.size)] for name, local in sources.items()}
            words = {"state": encode_tree(snapshot.tree, known.__getitem__), "tensors": tensors}
            return sources, {}, json.dumps(words).encode()

        if self._ranks.group is None:
            sources, _, words = tell()
            return sources, json.loads(words)
        sources, told = in_step_telling(self._ranks.group, tell, subject="the state's")
        return sources, json.loads(next(words for words in told if words))

    def _stored(self, words: Any) -> Node:
        """The old state as those know it who have it not; objects of the new one have made room for it."""
        tensors = {
            name: StoredTensor(
                name, dtype_from_name(dtype, name), torch.Size(size), whole_on_rank(torch.Size(size), self._old[0])
            )
            for name, (dtype, size) in words["tensors"].items()
        }
        stored = state_tree.parse_state(
            decode_tree(words["state"], tensors), lambda owner, _: None, tensors=(StoredTensor,)
        )

        def find() -> tuple[list[Any], Fields, int | None]:
            if self._new_state is None:
                return [], {}, None
            owners = objects_without_state(self._new_state, stored)
            return owners, {}, len(owners)

        owners, told = self._ranks.in_step(find)
        for number in range(self._agreed(told, "objects to make room in")):
            self._together(owners[number].init_state if owners else _nothing)
        return stored

    def _fit(self, stored: Node) -> tuple[Node | None, dict[str, Given], dict[str, Take], int]:
        """The new state as a tree, its tensors and which of the old ones fill them, and how many objects it has."""

        def fit() -> tuple[Any, Fields, list[Any] | None]:
            if self._new_state is None:
                return (None, {}, {}), {}, None
            match = Match(state="the new state", stored="the old one")
            target = match_state(self._new_state, stored, match)
            match.require("the old state and the new one do not have the same form; nothing was moved", advice=False)
            require_module_data(target)
            pairs = sorted(match.pairs, key=lambda pair: pair[0])
            locals_ = [Local.of(name, tensor, self._ranks) for name, tensor, _ in pairs]
            names = _names(there.name for _, _, there in pairs)
            first: dict[Any, str] = {}
            targets = {
                name: _given(local, None, first.setdefault(_memory(local, name), name))
                for name, local in zip(names, locals_, strict=True)
            }
            recipe = {name: Take(there.name) for name, (_, _, there) in zip(names, pairs, strict=True)}
            brought = [count_objects(target, stored), [[name, take.name] for name, take in recipe.items()]]
            return (target, targets, recipe), {}, brought

        (target, targets, _), told = self._ranks.in_step(fit)
        count, recipe = self._agreed(told, "entries")
        return target, targets, {name: Take(source) for name, source in recipe}, count

    def _agreed(self, told: Sequence[Any], what: str) -> Any:
        """What all ranks of the new state have told alike."""
        known = [(rank, one) for rank, one in zip(self._ranks.all, told, strict=True) if rank in self._new]
        for rank, other in known:
            if other != known[0][1]:
                raise RankMismatchError(
                    f"the new state has other {what} on rank {rank} than on rank {known[0][0]}; nothing was moved"
                )
        return known[0][1]

    def _together(self, work: Callable[[], Any]) -> None:
        def done() -> tuple[None, Fields, None]:
            work()
            return None, {}, None

        self._ranks.in_step(done)


def _ranks_of(lost: object) -> list[int]:
    """Ranks as they are given, each once."""
    found: list[Any] = list(lost) if isinstance(lost, Iterable) else [None]
    if isinstance(lost, str) or not all(type(rank) is int and rank >= 0 for rank in found):
        raise ProcessGroupError(f"lost should be the numbers of ranks, not {lost!r:.80}")
    return sorted(set(found))


def _nothing() -> None:
    """The part of a rank that has none."""


def _names(names: Iterable[str]) -> list[str]:
    """For each tensor a name of its own, in which no character has a meaning for recipes."""
    found: dict[str, None] = {}
    for name in names:
        name = name.replace("*", "_").replace("#", "_")
        while name in found:
            name += "'"
        found[name] = None
    return list(found)


def _given(local: Local, survivors: Survivors | None, tied: str | None = None) -> Given:
    layout, tensors = (None if local.plain else local.layout), local.tensors
    if layout is not None and survivors is not None:
        layout, tensors = surviving(layout, tensors, survivors)
    return Given(local.layout.size, local.dtype, layout, tensors, tied)


def _broken_off(error: TransferError, ranks: Ranks) -> Exception:
    """What every rank raises that has come so far, when another has not."""
    advice = (
        "(resize was moving tensors: the new state is partly filled, and the old one is as it was. If a rank is gone, "
        "make a group without it, and resize again with lost=[...])"
    )
    text = str(error)
    told = TransferError(text if advice in text else f"{text}\n{advice}")
    return mark_known(told, ranks.all) if is_known(error) else told


def _memory(local: Local, name: str) -> Any:
    memory = local.memory()
    return name if memory is None else (memory, local.layout)
