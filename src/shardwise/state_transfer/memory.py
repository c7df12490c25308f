"""What a rank must have for a transfer: memory for its boxes of both sides, and not the same for both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from shardwise.errors import PropertyError, StateMismatchError
from shardwise.state_transfer.planning import Options, Planned
from shardwise.state_transfer.routes import StateRoute
from shardwise.state_transfer.sides import State, places_of

MOST_WORK = 10_000  # steps to find out whether two tensors share memory: a few, but for strides that nobody has


def require_memory(planned: Planned, here: int, options: Options) -> None:
    """Raise unless this rank has the boxes that the layouts say, apart from each other."""
    used = dict.fromkeys(route.source for route in planned.routes)
    bare = [name for name in used if planned.sources[name].layout.rows_on(here) and not planned.has_source(name)]
    if bare:
        raise StateMismatchError(f"rank {here} has boxes of {named(bare)} of the source, and gives only the layout")
    wanted = [name for name in planned.made_of if planned.local_targets(name, here) is None]
    if wanted and options.on_arrival is None:
        raise StateMismatchError(
            f"rank {here} is to get boxes of {named(wanted)}, and gives only the layout: give a tensor, or "
            "on_arrival, which is handed what arrives"
        )
    if options.on_arrival is not None and not callable(options.on_arrival):
        raise PropertyError(f"on_arrival should be a function of a name and boxes, not {options.on_arrival!r:.80}")
    _require_apart(planned, here, options)


def named(names: Sequence[str]) -> str:
    """Some names in words."""
    return ", ".join(f"'{name}'" for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _require_apart(planned: Planned, here: int, options: Options) -> None:
    """Raise where memory of the target is to have two values, or is written over as a source before it is sent."""
    itself = {(route.source, route.target) for route in planned.routes if _is_itself(planned, route, here)}
    spans: list[_Span] = []
    for name in dict.fromkeys(route.source for route in planned.routes) if not options.staged else ():
        spans += _spans(name, planned.local_sources(name, here), of_target=False)
    for name in planned.made_of:
        own = list(_spans(name, planned.local_targets(name, here) or {}, of_target=True))
        if any(_lies_in_itself(span.tensor) for span in own):
            raise StateMismatchError(
                f"'{name}' of the target has elements that share memory on rank {here}, as after expand(): give a clone"
            )
        spans += own
    meeting: list[_Span] = []  # those that end behind the beginning of the next one
    for span in sorted(spans, key=lambda span: (span.device, span.begin)):
        meeting = [each for each in meeting if each.device == span.device and span.begin < each.end]
        for other in meeting:
            if (span.of_target or other.of_target) and _share_memory(span.tensor, other.tensor):
                _require_alike(planned, other, span, itself, here)
        meeting.append(span)


def _require_alike(planned: Planned, one: _Span, other: _Span, itself: set[tuple[str, str]], here: int) -> None:
    """Raise unless what two tensors have in the same memory is not changed, or filled alike for both."""
    if one.of_target and other.of_target:
        if _place(one.tensor) != _place(other.tensor) or _filling(planned, one) != _filling(planned, other):
            raise StateMismatchError(
                f"'{one.name}' and '{other.name}' of the target are in the same memory on rank {here}, and are to have "
                "different values: give each its own memory, or leave one of them out"
            )
        return
    source, target = (other, one) if one.of_target else (one, other)
    if (source.name, target.name) not in itself:
        raise StateMismatchError(
            f"'{source.name}' of the source and '{target.name}' of the target are in the same memory on rank {here}: "
            "the one would be written over before it is sent; give a copy of it, or to StateTransfer staged=True"
        )


def _filling(planned: Planned, span: _Span) -> object:
    """What a box of a target is made of; of tied sources, by the first name."""
    routes = [route for route in planned.routes if route.target == span.name]
    made = [(planned.sources[route.source].tied, route.patch._replace(source=None)) for route in routes]
    box = planned.targets[span.name].layout.at([span.row])
    return made, box.offsets.tolist(), box.sizes.tolist()


def _is_itself(planned: Planned, route: StateRoute, here: int) -> bool:
    """Whether a route leads from memory of this rank to the same: then all of it stays here, for what a rank has itself
    is not sent to it."""
    boxes = [layout.at(layout.rows_on(here)) for layout in (route.plan.src, route.plan.dst)]
    same = [[one.offsets.tolist(), one.sizes.tolist()] for one in boxes]
    if same[0] != same[1] or route.windows[0] != route.windows[1]:
        return False
    one, other = planned.local_sources(route.source, here), planned.local_targets(route.target, here)
    return [*map(_place, one.values())] == [*map(_place, (other or {}).values())]


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _spans(name: str, tensors: Mapping[int, torch.Tensor], *, of_target: bool) -> Iterator[_Span]:
    for row, tensor in tensors.items():
        if tensor.numel():
            extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            begin = tensor.data_ptr()
            end = begin + extent * tensor.element_size()
            yield _Span(str(tensor.device), begin, end, of_target, name, row, tensor)


def _lies_in_itself(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor may have memory in common: a step in a dim leads into what other dims reach."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have a byte in common; if that is too hard to tell, they have."""
    try:
        work: Any = MOST_WORK  # numpy's types know of fewer values than it takes
        return bool(np.shares_memory(_Memory(one), _Memory(other), max_work=work))
    except np.exceptions.TooHardError:
        return True


class _Span(NamedTuple):
    """The memory between the first and the last byte of a local box."""

    device: str
    begin: int
    end: int
    of_target: bool
    name: str
    row: int
    tensor: torch.Tensor


class _Memory:
    """Where the elements of a tensor lie, as numpy takes it: it does not look at the memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"|V{size}",
        }


def require_unmoved(planned: Planned, source: State, target: State) -> None:
    """Raise where a tensor is not in the memory that it was in when the transfer was planned, which would be moved."""
    for then, state, which in zip(planned.given, (source, target), ("source", "target"), strict=True):
        now = state.state_dict(keep_vars=True) if isinstance(state, nn.Module) else state or {}
        for name, one in then.items():
            if one.whole is not None and (name not in now or places_of(now[name]) != one.places):
                raise StateMismatchError(
                    f"'{name}' of the {which} is not where it was when the transfer was made, as after .to() or "
                    "load_state_dict(assign=True): make the StateTransfer anew"
                )
