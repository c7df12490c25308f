"""`Roster`: the parameters of an optimizer in groups, and torch's optimizer over their leaves on this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from shardwise.comm.agreement import in_step, record_call
from shardwise.comm.group import CallFingerprint, Fields, or_default
from shardwise.errors import OptimizerError
from shardwise.nn.optim import naming, state
from shardwise.nn.optim.member import Member, choose_update_frames, needs_gathering, new_member
from shardwise.nn.optim.scope import Scope, undeclared
from shardwise.tensor import ShardedTensor
from shardwise.tensor.dispatch import summary

Group = Mapping[str, Any]  # options, and parameters by name under "params"


class Roster:
    """The parameters of an optimizer. Every rank makes it alike; a digest of the parameters travels."""

    members: list[Member]
    sharded: list[Member]
    gathered: list[Member]  # updated whole
    with_several_shards: list[Member]  # on this rank

    def __init__(
        self, optimizer_class: type, scope: Scope | None, arguments: tuple[Any, Any], groups: list[dict[str, Any]]
    ) -> None:
        self.optimizer_class, self.scope = optimizer_class, scope
        self._arguments = arguments

        def work() -> tuple[tuple[list[list[Member]], torch.optim.Optimizer], Fields]:
            self._require_scope(groups)
            new: list[list[Member]] = []
            for group in groups:
                new.append(self._new_members(group, [member for members in new for member in members]))
            leaf_groups = [leaf_group(group, members) for group, members in zip(groups, new, strict=True)]
            return (new, self.new_optimizer(leaf_groups)), {"verb": "optimizer", **self._fields(groups)}

        self.groups, self.inner = in_step_if_sharded(_joint(groups), work)
        self._index()

    def new_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """An optimizer of the class that was asked for, with its arguments, for any groups of plain tensors."""
        args, kwargs = self._arguments
        optimizer: torch.optim.Optimizer = self.optimizer_class(groups, *args, **kwargs)
        return optimizer

    def add(self, group: Group) -> None:
        """Add another group. Every rank calls it; a digest travels. On an error, nothing has changed."""
        old = [{"params": {member.name: member.parameter for member in members}} for members in self.groups]

        def work() -> tuple[list[Member], Fields]:
            naming.require_distinct([*old, group])
            self._require_scope([*old, group])
            members = self._new_members(group, self.members)
            self.inner.add_param_group(leaf_group(group, members))
            return members, {"verb": "add_param_group", **self._fields([group])}

        kept = len(self.inner.param_groups)
        try:
            self.groups.append(in_step_if_sharded(_joint([*old, group]), work))
        except Exception:
            del self.inner.param_groups[kept:]  # an error on another rank
            raise
        self._index()

    def move_state(self, options: Mapping[str, Mapping[str, Any]]) -> None:
        """Move the state to the current layouts of the parameters. Every rank calls it; state travels if needed."""
        stale = [member for member in self.sharded if not member.is_current()]
        if not stale:
            return
        moved = [member for member in stale if not member.keeps_layout()]
        entries = state.state_by_name(lambda: (moved, self.inner.state), self.group) if moved else {}
        new = {member: self._renewed(member) for member in stale}
        moved_state = state.state_by_leaf([new[member] for member in moved], entries, options)
        for member in stale:
            before = [self.inner.state.pop(leaf, None) for leaf in member.leaves]
            if member not in moved:  # the same boxes, in other tensors
                pairs = zip(new[member].leaves, before, strict=True)
                moved_state.update({leaf: entry for leaf, entry in pairs if entry is not None})
        self.inner.state.update(moved_state)
        self.groups = [[new.get(member, member) for member in members] for members in self.groups]
        for inner, members in zip(self.inner.param_groups, self.groups, strict=True):
            inner["params"] = leaves_of(members)
        self._index()

    def _renewed(self, member: Member) -> Member:
        """The member for the current layout of its parameter; a gathered one keeps its update frame."""
        if member.update_frame is None and not member.keeps_layout():
            frame = choose_update_frames({member.name: member.parameter}, self.scope, self.members)[member.name]
        else:
            frame = member.update_frame
        new = new_member(member.name, member.parameter, frame)
        if member.update_frame is not None:
            new.leaves = member.leaves
        return new

    def _new_members(self, group: Group, others: Sequence[Member]) -> list[Member]:
        frames = choose_update_frames(group["params"], self.scope, others)
        return [new_member(name, tensor, frames[name]) for name, tensor in group["params"].items()]

    def _index(self) -> None:
        """Make the lists of members for a step."""
        self.members = [member for members in self.groups for member in members]
        self.sharded = [member for member in self.members if member.frame is not None]
        self.gathered = [member for member in self.members if member.update_frame is not None]
        self.with_several_shards = [m for m in self.sharded if m.update_frame is None and len(m.leaves) > 1]
        names = [member.name for member in self.members]
        self._step_fields = CallFingerprint(
            {"verb": "step", "optimizer_class": self.optimizer_class.__name__, "parameters": names}
        )
        self._in_one_group = len({id(member.parameter._process_group) for member in self.sharded}) == 1  # type: ignore[attr-defined] # sharded

    def note_step(self) -> None:
        """Note that this rank begins a step. Nothing is sent; ranks find a difference in their next message."""
        if self.sharded:
            group = self.sharded[0].parameter._process_group if self._in_one_group else None  # type: ignore[attr-defined] # sharded
            record_call(or_default(group), self._step_fields)

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """Every parameter by its name."""
        return {member.name: member.parameter for member in self.members}

    @property
    def group(self) -> ProcessGroup | None:
        """The process group of all members; None where none is sharded."""
        return _joint([{"params": self.named}])

    def _require_scope(self, groups: Sequence[Group]) -> None:
        """Raise if shards would be updated one by one by an optimizer of unknown scope."""
        named = {name: tensor for group in groups for name, tensor in group["params"].items()}
        sharded = {name: tensor for name, tensor in named.items() if isinstance(tensor, ShardedTensor)}
        if self.scope is None:
            for name, tensor in sharded.items():
                if needs_gathering(tensor, "tensor"):
                    raise undeclared(self.optimizer_class, name)
        if self.scope == "model" and len({id(tensor._process_group) for tensor in sharded.values()}) > 1:
            raise OptimizerError(
                f"{self.optimizer_class.__name__} looks at all parameters at once, but they lie in different process "
                "groups: bring them into one with redistribute(spec, process_group=...)"
            )

    def _fields(self, groups: Sequence[Group]) -> dict[str, object]:
        """The fields that must be equal on all ranks."""
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
        options = [args, kwargs, *map(naming.options, groups)]
        kind = {"optimizer_class": self.optimizer_class.__name__, "scope": self.scope}
        return {**kind, "options": summary(options), "parameters": outlines}


def leaves_of(members: Sequence[Member]) -> list[torch.Tensor]:
    """The leaves of these members."""
    return [leaf for member in members for leaf in member.leaves]


def leaf_group(group: Group, members: Sequence[Member]) -> dict[str, Any]:
    """A group as torch's optimizer takes it."""
    return {**naming.options(group), "params": leaves_of(members)}


def in_step_if_sharded(group: ProcessGroup | None, work: Callable[[], tuple[Any, Fields]]) -> Any:
    """As `in_step`; without communication if no parameter is sharded."""
    return work()[0] if group is None else in_step(group, work)


def _joint(groups: Sequence[Group]) -> ProcessGroup | None:
    """The group of all sharded parameters; the default group if they have several; None if there are none."""
    tensors = [tensor for group in groups for tensor in group["params"].values() if isinstance(tensor, ShardedTensor)]
    found = {id(tensor._process_group): tensor._process_group for tensor in tensors}
    return next(iter(found.values())) if len(found) == 1 else or_default(None) if found else None
