"""The state of torch's optimizer, by leaf, as entries by parameter name; and back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed import ProcessGroup

from shardwise.comm.agreement import in_step_sharing
from shardwise.comm.group import Fields
from shardwise.errors import LayoutError, OptimizerError
from shardwise.layout import Layout
from shardwise.layout.geometry import Boxes
from shardwise.layout.specs import FixedShardingSpec
from shardwise.nn.optim.member import Member
from shardwise.tensor import ShardedTensor
from shardwise.tensor.frame import Frame, Parts
from shardwise.tensor.shard import narrow_tensor_by_index

Entry = dict[str, Any]  # the state of one parameter, by key
LeafState = dict[torch.Tensor, Entry]  # what torch's optimizer keeps
Described = dict[str, list[Any]]  # for each key its kind, and what other ranks need
Work = Callable[[], tuple[Any, Fields, list[Described | None]]]  # gives a value, fields to compare, and descriptions
Share = Callable[[Work], tuple[Any, list[list[Described | None]]]]  # runs it; gives the descriptions of all ranks

LIKE, ONE, OTHER, PLAIN, OBJECT = "like", "one", "other", "plain", "object"


# From leaves to names ---------------------------------------------------------------------------------------------


def state_by_name(
    prepare: Callable[[], tuple[Sequence[Member], Mapping[torch.Tensor, Entry]]],
    group: ProcessGroup | None,
    share: Share | None = None,
) -> Any:
    """The entry of each name, alike on every rank: state of the parameter's size in its layout, numbers once.

    Every rank of the group calls it. Descriptions of the state travel; data only for parameters that are updated whole.
    ``prepare`` gives members and state; if it fails on one rank, it fails on all. With ``share``, the descriptions
    travel by it, and no data: state stays in the layout that it has.
    """
    known: dict[str, Described] = {}
    if group is None:
        members, state = prepare()
    else:

        def work() -> tuple[Any, Fields, list[Described | None]]:
            members, state = prepare()
            sharded = [member for member in members if member.frame is not None]
            descriptions = [describe_state(member, state) for member in sharded]
            fields = {"verb": "state_dict", "names": [member.name for member in sharded]}
            return (members, state, sharded), fields, descriptions

        (members, state, sharded), by_rank = _shared_in(group, work) if share is None else share(work)
        known = {member.name: _merged(member, each) for member, *each in zip(sharded, *by_rank, strict=True)}
    in_place = share is not None
    with torch.no_grad():
        return {
            member.name: {
                key: _value(member, key, kind, state, in_place) for key, kind in known.get(member.name, {}).items()
            } if member.frame is not None else dict(state.get(member.leaves[0], {}))
            for member in members
        }  # fmt: skip


def _shared_in(group: ProcessGroup, work: Work) -> tuple[Any, list[list[Described | None]]]:
    value, told = in_step_sharing(group, work)
    return value, told.kinds


def describe_state(member: Member, state: Mapping[torch.Tensor, Entry]) -> Described | None:
    """The description of the leaves' state; None without leaves."""
    if not member.leaves:
        return None
    entries = [state.get(leaf, {}) for leaf in member.leaves]
    if any(entry.keys() != entries[0].keys() for entry in entries):
        raise OptimizerError(f"the shards of {member.name!r} on one rank have different kinds of state")
    return {key: _kind(key, [entry[key] for entry in entries], member) for key in entries[0]}


def _kind(key: str, values: list[Any], member: Member) -> list[Any]:
    first = values[0]
    if all(isinstance(value, torch.Tensor) for value in values):
        dtype = str(first.dtype).removeprefix("torch.")
        if all(value.shape == leaf.shape for value, leaf in zip(values, member.leaves, strict=True)):
            return [LIKE, dtype]
        if all(value.ndim == 0 for value in values):
            return [ONE, dtype, _number(first)]
        return [OTHER, dtype, list(first.shape)]
    if all(value is None or isinstance(value, bool | int | float | str) for value in values):
        return [PLAIN, None, first]
    return [OBJECT, type(first).__name__]


def _number(scalar: torch.Tensor) -> Any:
    """A scalar as a JSON value."""
    value = scalar.item()
    return [value.real, value.imag] if isinstance(value, complex) else value


def _merged(member: Member, by_rank: list[Described | None]) -> Described:
    """The description of one parameter's state, if all ranks that have leaves agree."""
    found = [one for one in by_rank if one is not None]
    if not found:
        return {}
    state_frame = member.state_frame
    assert state_frame is not None, "plain parameters are not described"
    for other in found[1:]:
        if {key: kind[:2] for key, kind in other.items()} != {key: kind[:2] for key, kind in found[0].items()}:
            raise OptimizerError(
                f"ranks have different kinds of state for {member.name!r}: {_names(found[0])} and {_names(other)}"
            )
    for key, (kind, *_) in found[0].items():
        if (kind == OTHER and not state_frame.layout.is_whole_everywhere) or (
            kind == OBJECT and len(found) < len(by_rank)
        ):
            raise OptimizerError(
                f"state {key!r} of {member.name!r} is neither a number, nor one for all its shards, nor of its size: "
                "the optimizer looks at more than one element, so declare it with UpdateScope(..., 'tensor')"
            )
    return found[0]


def _names(entry: Described) -> str:
    return ", ".join(f"{key} ({kind[0]})" for key, kind in entry.items()) or "none"


def _value(member: Member, key: str, kind: list[Any], state: Mapping[torch.Tensor, Entry], in_place: bool) -> Any:
    """The state of a sharded parameter under one key: in the parameter's layout, or in place."""
    frame, state_frame = member.frame, member.state_frame
    assert frame is not None, "a plain parameter has its state as it is"
    assert state_frame is not None, "as above"
    what, detail, *rest = kind
    mine = [state[leaf][key] for leaf in member.leaves]
    if what == PLAIN:
        return rest[0]
    if what == OBJECT:
        return copy.deepcopy(mine[0])
    dtype: torch.dtype = getattr(torch, detail)
    if what == ONE:
        number = complex(*rest[0]) if isinstance(rest[0], list) else rest[0]
        return mine[0] if mine else torch.tensor(number, dtype=dtype)
    if what == LIKE:
        local = _wrapped(state_frame, dtype, mine)
        return local if member.update_frame is None or in_place else local.redistribute(frame.spec)
    size = torch.Size(rest[0])
    local = _wrapped(frame_for(state_frame, size), dtype, mine)
    projected = None if member.update_frame is None or in_place else project(frame.layout, size)
    return local if projected is None else local.redistribute(FixedShardingSpec.of(projected))


def _wrapped(frame: Frame, dtype: torch.dtype, tensors: list[torch.Tensor]) -> ShardedTensor:
    return ShardedTensor._wrap(Parts(frame.with_dtype(dtype), [tensor.detach() for tensor in tensors]))


def local_state(member: Member, state: Mapping[torch.Tensor, Entry]) -> Entry:
    """The state of a parameter on this rank, over the same memory. No communication."""
    state_frame = member.state_frame
    if state_frame is None or not member.leaves:
        return {key: value for leaf in member.leaves for key, value in state.get(leaf, {}).items()}
    entry: Entry = {}
    for key, (kind, *_) in (describe_state(member, state) or {}).items():
        mine = [state[leaf][key] for leaf in member.leaves]
        entry[key] = _wrapped(state_frame, mine[0].dtype, mine) if kind == LIKE else mine[0]
    return entry


class States(Mapping[torch.Tensor, Any]):
    """The state on this rank of each parameter that has any."""

    def __init__(self, members: Sequence[Member], state: Mapping[torch.Tensor, Entry]) -> None:
        self._members = {id(member.parameter): member for member in members}
        self._state = state

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        if id(parameter) not in self._members:
            raise KeyError(f"a tensor of size {tuple(parameter.shape)} that is no parameter of this optimizer")
        return local_state(self._members[id(parameter)], self._state)

    def __iter__(self) -> Iterator[torch.Tensor]:
        having = (m for m in self._members.values() if any(self._state.get(leaf) for leaf in m.leaves))
        return (member.parameter for member in having)

    def __len__(self) -> int:
        return sum(1 for _ in self)


# Layouts of state whose size is not the parameter's ---------------------------------------------------------------


def frame_for(state_frame: Frame, size: torch.Size) -> Frame:
    """The frame of state of this size for the leaves of a frame: whole beside each leaf unless of the leaves' size."""
    if size == state_frame.size:
        return state_frame
    layout = Layout.whole(size, state_frame.layout.places)
    return Frame.of(layout, None, state_frame.rows, state_frame.dtype, state_frame.process_group)


def project(layout: Layout, size: torch.Size) -> Layout | None:
    """The layout of state that has one value for a whole dim of the parameter: its boxes, of length 1 in such dims.

    None if the size is of another kind, or if boxes that differ only in those dims do not become equal.
    """
    if len(size) != layout.ndim or any(new not in (1, old) for new, old in zip(size, layout.size, strict=True)):
        return None
    flat = [new != old for new, old in zip(size, layout.size, strict=True)]
    offsets, sizes = layout.boxes.offsets.copy(), layout.boxes.sizes.copy()
    offsets[:, flat] = 0
    sizes[:, flat] = sizes[:, flat].clip(max=1)
    table = np.concatenate([offsets, sizes, layout.places.distinct[1].reshape(-1, 1)], 1)
    filled = np.flatnonzero(sizes.all(axis=1))
    rows = np.sort(filled[np.unique(table[filled], axis=0, return_index=True)[1]])
    boxes = Boxes(offsets[rows], sizes[rows])
    try:
        return Layout.checked(size, boxes, layout.places.take(rows), boxes.describe, replicas=True)
    except LayoutError:
        return None


# From names to leaves -----------------------------------------------------------------------------------------------


def state_by_leaf(
    members: Sequence[Member], entries: Mapping[str, Entry], options: Mapping[str, Mapping[str, Any]]
) -> LeafState:
    """New state for the leaves of these members, from matching entries in any layout.

    Every rank calls it, with the same keys in the same order. Parts that a rank does not have travel.
    """
    new: LeafState = {}
    with torch.no_grad():
        for member in members:
            entry = entries[member.name]
            spread = {key: _spread(member, value) for key, value in entry.items()}
            for k, leaf in enumerate(member.leaves if entry else []):
                new[leaf] = {key: _cast(leaf, key, spread[key][k], options[member.name]) for key in entry}
    return new


def _spread(member: Member, value: Any) -> list[Any]:
    """A value of its own for each leaf."""
    state_frame = member.state_frame
    if isinstance(value, ShardedTensor):
        if state_frame is None:
            return [value.full_tensor()]
        target = frame_for(state_frame, value.shape)
        group = None if value._process_group is state_frame.process_group else state_frame.process_group
        there: ShardedTensor = value.redistribute(FixedShardingSpec.of(target.layout), process_group=group)
        return there._local_tensors()
    if isinstance(value, torch.Tensor) and state_frame is not None and value.shape == state_frame.size:
        boxes = state_frame.layout.at(state_frame.rows)
        parts = zip(boxes.offsets.tolist(), boxes.sizes.tolist(), strict=True)
        return [narrow_tensor_by_index(value.detach(), *part).clone() for part in parts]
    return [value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value) for _ in member.leaves]


def _cast(leaf: torch.Tensor, key: str, value: Any, options: Mapping[str, Any]) -> Any:
    """As torch does when it loads: floats in the dtype of the parameter and on its device, counters as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    if key == "step":
        on_device = options.get("capturable") or options.get("fused")
        return value.to(leaf.device, torch.float32) if on_device else value.cpu()
    as_leaf = leaf.is_floating_point() and value.is_floating_point()
    return value.to(leaf.device, leaf.dtype if as_leaf else value.dtype)
