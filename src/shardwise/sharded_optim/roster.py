"""`Roster`: who is trained. Members in groups, and the torch optimizer over their leaves on this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from shardwise.dispatch import summary
from shardwise.errors import OptimizerError
from shardwise.process_group import Fields, Said, follow, in_step, or_default
from shardwise.sharded_optim import naming, state
from shardwise.sharded_optim.member import Member, homes_of, needs_home, new_member
from shardwise.sharded_optim.scope import Scope, undeclared
from shardwise.sharded_tensor import ShardedTensor

Group = Mapping[str, Any]  # options, and parameters by name under "params"


class Roster:
    """The members of an optimizer. Every rank makes it alike; a digest of the parameters travels."""

    members: list[Member]
    sharded: list[Member]
    visitors: list[Member]  # those that go elsewhere for a step
    several: list[Member]  # those of which several shards are here

    def __init__(
        self, optimizer_class: type, scope: Scope | None, arguments: tuple[Any, Any], groups: list[dict[str, Any]]
    ) -> None:
        self.optimizer_class, self.scope = optimizer_class, scope
        self._arguments = arguments

        def work() -> tuple[tuple[list[list[Member]], torch.optim.Optimizer], Fields]:
            self._require_scope(groups)
            made: list[list[Member]] = []
            for group in groups:
                made.append(self._enlisted(group, [member for members in made for member in members]))
            given = [leaf_group(group, new) for group, new in zip(groups, made, strict=True)]
            return (made, self.new_optimizer(given)), {"verb": "optimizer", **self._fields(groups)}

        self.groups, self.inner = together(_joint(groups), work)
        self._sort()

    def new_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """An optimizer of the class that was asked for, with its arguments, for any groups of plain tensors."""
        args, kwargs = self._arguments
        optimizer: torch.optim.Optimizer = self.optimizer_class(groups, *args, **kwargs)
        return optimizer

    def add(self, group: Group) -> None:
        """Take on another group. Every rank calls it; a digest travels. On an error, nothing has changed."""
        old = [{"params": {member.name: member.parameter for member in members}} for members in self.groups]

        def work() -> tuple[list[Member], Fields]:
            naming.require_distinct([*old, group])
            self._require_scope([*old, group])
            members = self._enlisted(group, self.members)
            self.inner.add_param_group(leaf_group(group, members))
            return members, {"verb": "add_param_group", **self._fields([group])}

        kept = len(self.inner.param_groups)
        try:
            self.groups.append(together(_joint([*old, group]), work))
        except Exception:
            del self.inner.param_groups[kept:]  # where another rank had an objection
            raise
        self._sort()

    def follow(self, options: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the state along to where parameters lie now. Every rank calls it; it travels if a layout has changed."""
        stale = [member for member in self.sharded if not member.is_current()]
        if not stale:
            return
        moved = [member for member in stale if not member.keeps_layout()]
        entries = state.exported(lambda: (moved, self.inner.state), self.group) if moved else {}
        new = {member: self._renewed(member) for member in stale}
        there = state.imported([new[member] for member in moved], entries, options)
        for member in stale:
            before = [self.inner.state.pop(leaf, None) for leaf in member.leaves]
            if member not in moved:  # the same boxes, in other tensors
                pairs = zip(new[member].leaves, before, strict=True)
                there.update({leaf: entry for leaf, entry in pairs if entry is not None})
        self.inner.state.update(there)
        self.groups = [[new.get(member, member) for member in members] for members in self.groups]
        for inner, members in zip(self.inner.param_groups, self.groups, strict=True):
            inner["params"] = leaves_of(members)
        self._sort()

    def _renewed(self, member: Member) -> Member:
        """The member as its parameter lies now; what is updated at a home stays there."""
        if member.home is None and not member.keeps_layout():
            home = homes_of({member.name: member.parameter}, self.scope, self.members)[member.name]
        else:
            home = member.home
        new = new_member(member.name, member.parameter, home)
        if member.home is not None:
            new.leaves = member.leaves
        return new

    def _enlisted(self, group: Group, others: Sequence[Member]) -> list[Member]:
        homes = homes_of(group["params"], self.scope, others)
        return [new_member(name, tensor, homes[name]) for name, tensor in group["params"].items()]

    def _sort(self) -> None:
        """Make the lists that a step goes through, so that it looks at no member without need."""
        self.members = [member for members in self.groups for member in members]
        self.sharded = [member for member in self.members if member.frame is not None]
        self.visitors = [member for member in self.members if member.home is not None]
        self.several = [m for m in self.sharded if m.home is None and len(m.leaves) > 1]
        names = [member.name for member in self.members]
        self._said = Said({"verb": "step", "optimizer_class": self.optimizer_class.__name__, "parameters": names})
        self._in_one_group = len({id(member.parameter._process_group) for member in self.sharded}) == 1  # type: ignore[attr-defined] # sharded

    def note_step(self) -> None:
        """This rank begins a step: nothing is sent, but ranks that do not all step find out when they meet, or wait."""
        if self.sharded:
            one = self.sharded[0].parameter._process_group if self._in_one_group else None  # type: ignore[attr-defined] # sharded
            follow(or_default(one), self._said)

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """Every parameter by its name."""
        return {member.name: member.parameter for member in self.members}

    @property
    def group(self) -> ProcessGroup | None:
        """The process group of all members; None where none is sharded."""
        return _joint([{"params": self.named}])

    def _require_scope(self, groups: Sequence[Group]) -> None:
        """Raise where shards would be updated one by one and nobody has said that they may."""
        named = {name: tensor for group in groups for name, tensor in group["params"].items()}
        sharded = {name: tensor for name, tensor in named.items() if isinstance(tensor, ShardedTensor)}
        if self.scope is None:
            for name, tensor in sharded.items():
                if needs_home(tensor, "tensor"):
                    raise undeclared(self.optimizer_class, name)
        if self.scope == "model" and len({id(tensor._process_group) for tensor in sharded.values()}) > 1:
            raise OptimizerError(
                f"{self.optimizer_class.__name__} looks at all parameters at once, but they lie in different process "
                "groups: bring them into one with redistribute(spec, process_group=...)"
            )

    def _fields(self, groups: Sequence[Group]) -> dict[str, object]:
        """What must be the same on every rank."""
        outlines = [
            [
                name,
                tuple(tensor.shape),
                str(tensor.dtype),
                tensor._layout.digest.hex() if isinstance(tensor, ShardedTensor) else "plain",
            ]
            for group in groups
            for name, tensor in group["params"].items()
        ]
        args, kwargs = self._arguments
        said = [args, kwargs, *map(naming.options, groups)]
        kind = {"optimizer_class": self.optimizer_class.__name__, "scope": self.scope}
        return {**kind, "options": summary(said), "parameters": outlines}


def leaves_of(members: Sequence[Member]) -> list[torch.Tensor]:
    """What torch's optimizer updates for these members."""
    return [leaf for member in members for leaf in member.leaves]


def leaf_group(group: Group, members: Sequence[Member]) -> dict[str, Any]:
    """A group as torch's optimizer takes it."""
    return {**naming.options(group), "params": leaves_of(members)}


def together(group: ProcessGroup | None, work: Callable[[], tuple[Any, Fields]]) -> Any:
    """As `in_step`; alone where no parameter is sharded."""
    return work()[0] if group is None else in_step(group, work)


def _joint(groups: Sequence[Group]) -> ProcessGroup | None:
    """The group of all sharded parameters; the default group if they have several; None if there are none."""
    tensors = [tensor for group in groups for tensor in group["params"].values() if isinstance(tensor, ShardedTensor)]
    found = {id(tensor._process_group): tensor._process_group for tensor in tensors}
    return next(iter(found.values())) if len(found) == 1 else or_default(None) if found else None
