"""The two sides of a transfer: what each rank gives of them, and what all ranks together know."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwise.checkpoint.archive.layout_json import PlacesWriter, layout_from_json, layout_to_json, places_from_json
from shardwise.checkpoint.archive.stored import dtype_from_name, dtype_name
from shardwise.checkpoint.local import Local
from shardwise.checkpoint.ranks import Ranks
from shardwise.errors import CheckpointError, StateMismatchError
from shardwise.layout import Layout, Places
from shardwise.layout.geometry import IntArray
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import is_dtensor


@dataclass(frozen=True, eq=False)
class Given:
    """What this rank gives of one tensor: what it is, and the rows of its layout that are here."""

    size: torch.Size
    dtype: torch.dtype | None  # a bare layout has none
    layout: Layout | None  # of a plain tensor, None: it is whole on each rank that gives it
    tensors: Mapping[int, torch.Tensor] = field(default_factory=dict)
    tied: str | None = None  # the first name of the side for the same memory
    whole: torch.Tensor | None = None  # as it was given
    places: object = None  # where its memory was then

    def words(self, places: PlacesWriter) -> dict[str, Any]:
        """What others are told."""
        dtype = None if self.dtype is None else dtype_name(self.dtype)
        layout = None if self.layout is None else layout_to_json(self.layout, places)
        return {"size": list(self.size), "dtype": dtype, "layout": layout, "tied": self.tied}


State = Mapping[str, torch.Tensor | Layout] | Mapping[str, Given] | nn.Module | None


@dataclass(frozen=True, eq=False)
class Tensor:
    """What all know of a tensor of one side: on which ranks of the wire which boxes of it lie."""

    size: torch.Size
    dtype: torch.dtype | None  # None where all give a bare layout
    layout: Layout
    tied: str  # the first name for the same memory, its own if there is no other


def given(state: State, ranks: Ranks) -> dict[str, Given]:
    """What a rank gives of a side, or the error that names what cannot be moved between these ranks."""
    found = _given(state, ranks)
    members = np.array(ranks.all, dtype=np.int64)
    known: dict[int, Places] = {}  # whose ranks all take part: most tensors lie on the same ones
    for name, one in found.items():
        if one.layout is not None and id(one.layout.places) not in known:
            _require_members(name, one.layout, members)
            known[id(one.layout.places)] = one.layout.places
    return found


def _require_members(name: str, layout: Layout, members: IntArray) -> None:
    """Raise where a rank that does not take part has a box: nobody could send it, or receive it."""
    if np.isin(layout.ranks, members).all():
        return
    holders = layout.ranks[layout.boxes.filled]
    outside = holders[~np.isin(holders, members)]
    if len(outside):
        raise StateMismatchError(
            f"'{name}' has boxes on rank {outside[0]}, which does not take part: give a process group of all ranks "
            "that have a part of either side"
        )


def _given(state: State, ranks: Ranks) -> dict[str, Given]:
    """The same of a state whose layouts are known to fit."""
    if state is None:
        return {}
    if isinstance(state, nn.Module):
        state = state.state_dict(keep_vars=True)
    if not isinstance(state, Mapping):
        raise StateMismatchError(
            f"a side of a transfer is a mapping from names to tensors; found {type(state).__name__}"
        )
    found: dict[str, Given] = {}
    first: dict[object, str] = {}  # by the memory
    for name, value in state.items():
        if not isinstance(name, str):
            raise StateMismatchError(f"the names of a state are strings; found {name!r:.80}")
        if isinstance(value, Layout):
            found[name] = Given(value.size, None, value)
        elif isinstance(value, Given):
            found[name] = value
        elif isinstance(value, torch.Tensor):
            found[name] = _of_tensor(name, value, ranks, first)
        else:
            raise StateMismatchError(
                f"'{name}' is a {type(value).__name__}, neither a tensor nor a Layout: give a mapping without it"
            )
    return found


def _of_tensor(name: str, tensor: torch.Tensor, ranks: Ranks, first: dict[object, str]) -> Given:
    try:
        local = Local.of(name, tensor, ranks)
    except CheckpointError as error:
        raise StateMismatchError(str(error)) from error
    sharded = isinstance(tensor, ShardedTensorBase) or is_dtensor(tensor)
    memory = local.memory()
    tied = None if memory is None else first.setdefault(memory, name)  # whoever has none of it cannot tell
    layout = local.layout if sharded else None
    return Given(local.layout.size, local.dtype, layout, local.tensors, tied, tensor, places_of(tensor))


def places_of(tensor: object) -> list[tuple[object, ...]]:
    """Where the memory of a tensor is on this rank, by which is known if that changes."""
    if isinstance(tensor, ShardedTensorBase):
        local: Sequence[torch.Tensor] = tensor._local_tensors()
    elif isinstance(tensor, torch.Tensor):
        local = [getattr(tensor, "_local_tensor", tensor)]  # of a DTensor
    else:
        local = ()
    return [(each.data_ptr(), each.dtype, each.device, each.shape, each.stride()) for each in local]


def words_of(one: Mapping[str, Given], other: Mapping[str, Given]) -> bytes:
    """Both sides, as this rank gives them."""
    sides = []
    for side in (one, other):
        places = PlacesWriter()
        tensors = {name: each.words(places) for name, each in side.items()}
        sides.append({"places": places.words, "tensors": tensors})
    return json.dumps(sides, separators=(",", ":")).encode()


def side_digest(words: bytes) -> str:
    """By which ranks that give the same are known."""
    return hashlib.blake2b(words, digest_size=16).hexdigest()


Gathered = tuple[
    Sequence[int], int, Any
]  # ranks, what is added to the ranks of their layouts, and what they told of a side


def joined(which: str, told: Sequence[Gathered], ranks: int, problems: list[str]) -> dict[str, Tensor]:
    """A side, given what those have told of it who give any of it, of so many ranks in all."""
    places = [places_from_json(words["places"], ranks) for _, _, words in told]
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for _, _, words in told for name in words["tensors"]):
        said = [
            (number, words["tensors"][name]) for number, (_, _, words) in enumerate(told) if name in words["tensors"]
        ]
        sizes = {tuple(words["size"]) for _, words in said}
        dtypes = {words["dtype"] for _, words in said} - {None}
        if len(sizes) > 1:
            problems.append(f"'{name}' of the {which} is of size {' and '.join(map(str, sorted(sizes)))}")
            continue
        if len(dtypes) > 1:
            problems.append(f"'{name}' of the {which} is of {' and '.join(sorted(dtypes))}")
            continue
        size = torch.Size(sizes.pop())
        layouts = [
            _moved(layout_from_json(name, size, words["layout"], places[number], replicas=True), told[number][1])
            for number, words in said
            if words["layout"] is not None
        ]
        plain = sorted(rank for number, words in said if words["layout"] is None for rank in told[number][0])
        if plain:
            layouts.append(Layout.whole(size, Places.on_ranks(np.array(plain, dtype=np.int64), "cpu")))
        if any(layout != layouts[0] for layout in layouts):
            first, last = (told[number][0][0] for number in (said[0][0], said[-1][0]))
            problems.append(f"'{name}' of the {which} has another layout on rank {last} than on rank {first}")
            continue
        dtype = dtype_from_name(dtypes.pop(), name) if dtypes else None
        ties = {words["tied"] for _, words in said} - {None}
        other = found.get(ties.pop()) if len(ties) == 1 else None
        alike = other is not None and other.layout == layouts[0]
        if alike:  # but whoever gives no memory is handed what arrives under each of its names
            having = [rank for number, words in said if words["dtype"] is not None for rank in told[number][0]]
            alike = bool(np.isin(layouts[0].ranks, having).all())
        found[name] = Tensor(size, dtype, layouts[0], other.tied if other is not None and alike else name)
        if found[name].dtype is None and which == "source":
            problems.append(f"'{name}' of the source is nowhere: every rank gives only its layout")
    return found


def _moved(layout: Layout, by: int) -> Layout:
    return layout if not by else layout.on(Places.on_ranks(layout.ranks + by, "cpu"))
