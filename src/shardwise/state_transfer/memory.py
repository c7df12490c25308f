"""What a rank must have for a transfer: memory for its boxes of both sides, and not the same for both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from shardwise.checkpoint.ranks import Ranks
from shardwise.errors import StateMismatchError
from shardwise.state_transfer.planning import Options, Planned
from shardwise.state_transfer.routes import Route
from shardwise.state_transfer.sides import Given, State, given

Span = tuple[str, int, int, bool, str]  # device, first byte and end, whether of the target, name


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
    _require_apart(planned, here)


def named(names: Sequence[str]) -> str:
    """Some names in words."""
    return ", ".join(f"'{name}'" for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _require_apart(planned: Planned, here: int) -> None:
    """Raise where a target would be written over a source that is still to be sent; onto itself it may be."""
    itself = {(route.source, route.target) for route in planned.routes if _is_itself(planned, route, here)}
    spans: list[Span] = []
    for name in dict.fromkeys(route.source for route in planned.routes):
        spans += _spans(name, planned.local_sources(name, here), of_target=False)
    for name in planned.made_of:
        spans += _spans(name, planned.local_targets(name, here) or {}, of_target=True)
    ends: dict[tuple[str, bool], tuple[int, str]] = {}
    for device, low, high, of_target, name in sorted(spans):
        end, other = ends.get((device, not of_target), (0, ""))
        source, target = (other, name) if of_target else (name, other)
        if low < end and (source, target) not in itself:
            raise StateMismatchError(
                f"'{source}' of the source and '{target}' of the target are in the same memory on rank {here}: "
                "the one would be written over before it is sent; give a copy of it"
            )
        ends[device, of_target] = max(ends.get((device, of_target), (0, "")), (high, name))


def _is_itself(planned: Planned, route: Route, here: int) -> bool:
    """Whether a route leads from memory of this rank to the same: then all of it stays here, for what a rank has itself
    is not sent to it."""
    boxes = [layout.at(layout.rows_on(here)) for layout in (route.plan.src, route.plan.dst)]
    same = [[one.offsets.tolist(), one.sizes.tolist()] for one in boxes]
    if same[0] != same[1] or route.windows[0] != route.windows[1]:
        return False
    one, other = planned.local_sources(route.source, here), planned.local_targets(route.target, here)
    return [*map(_place, one.values())] == [*map(_place, (other or {}).values())]


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.stride(), tensor.dtype


def _spans(name: str, tensors: Mapping[int, torch.Tensor], *, of_target: bool) -> Iterator[Span]:
    for tensor in tensors.values():
        if tensor.numel():
            extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
            begin = tensor.data_ptr()
            yield str(tensor.device), begin, begin + extent * tensor.element_size(), of_target, name


def require_unmoved(planned: Planned, source: State, target: State, ranks: Ranks) -> None:
    """Raise where a tensor is not in the memory that it was in when the transfer was planned, which would be moved."""
    for then, state, which in zip(planned.given, (source, target), ("source", "target"), strict=True):
        now = given(state, ranks)
        for name, one in then.items():
            if name not in now or _places(now[name]) != _places(one):
                raise StateMismatchError(
                    f"'{name}' of the {which} is not where it was when the transfer was made, as after .to() or "
                    "load_state_dict(assign=True): make the StateTransfer anew"
                )


def _places(one: Given) -> list[tuple[object, ...]]:
    return [(t.data_ptr(), t.dtype, t.device, t.shape, t.stride()) for t in one.tensors.values()]
