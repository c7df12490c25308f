"""The base of every sharding spec, and of placements that are named by a spec of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from shardwise import settings
from shardwise.dispatch import registry
from shardwise.errors import FrozenSpecError, SpecError
from shardwise.layout import Layout, Places
from shardwise.metadata import ShardedTensorMetadata, TensorProperties
from shardwise.placement import PlacementLike, RemoteDevice, all_ranks, parse, parse_all


class PlacementSpec(ABC):  # noqa: B024 - an open base, nothing to implement
    """Base of specs that say where something is placed."""


@dataclass
class DevicePlacementSpec(PlacementSpec):
    """Something placed on one device of one process."""

    device: RemoteDevice

    def __post_init__(self) -> None:
        self.device = parse(self.device)


class ShardingSpec(ABC):
    """Base of all sharding specs: a rule that cuts a tensor of some size into boxes on ranks.

    A spec of your own implements `build_metadata`; everything else follows from it. `layout(size)` is its answer for a
    size, without communication, or an error that says why it has none::

        >>> shardwise.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]).layout((5, 4)).boxes.sizes.tolist()
        [[3, 4], [2, 4]]
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Who overrides `build_metadata` has said all: a layout that a base class makes faster no longer holds.
        super().__init_subclass__(**kwargs)
        if "build_metadata" in vars(cls) and "layout" not in vars(cls):
            cls.layout = ShardingSpec.layout  # type: ignore[method-assign] # on purpose

    @abstractmethod
    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """The shards of a tensor of this size, as new records. Needs no communication."""

    def layout(self, size: Sequence[int]) -> Layout:
        """The same answer as the frozen layout that the library works with."""
        metadata = self.build_metadata(torch.Size(size), TensorProperties())
        return Layout.from_metadata(metadata.shards_metadata, metadata.size)

    def shard(self, tensor: torch.Tensor, src_rank: int = 0, process_group: Any = None) -> Any:
        """The tensor that the group's rank ``src_rank`` has, cut by this spec: see `shard_tensor`.

        A class may have its own; `shard_tensor` then asks it, on every rank of the group.
        """
        return registry.verbs["shard"](tensor, self, src_rank, process_group)

    def _plain_arguments(self) -> tuple[Any, ...] | None:
        """Constructor arguments made of plain values only, so that `torch.load` can rebuild the spec safely."""
        return None

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A subclass may hold more than its base's arguments: unless it says otherwise, it travels as any object.
        arguments = self._plain_arguments() if "_plain_arguments" in vars(type(self)) else None
        return super().__reduce_ex__(protocol) if arguments is None else (type(self), arguments)


class PlacedShardingSpec(ShardingSpec):
    """Base of specs with a list of placements: a value, which is hashed and compared by what it says.

    One that is made on the drop-in can be changed, as the old ones: placements are parsed whenever a list is assigned.
    """

    placements: Sequence[RemoteDevice]

    def __setattr__(self, name: str, value: Any) -> None:
        self._require_free(name)
        super().__setattr__(name, self._parsed(value) if name == "placements" else value)

    def __delattr__(self, name: str) -> None:
        self._require_free(name)
        super().__delattr__(name)

    def _require_free(self, name: str) -> None:
        """Raise if this is a field of a spec that is a value. The kind of its placements says whether it is one."""
        frozen = isinstance(vars(self).get("placements"), tuple)
        if frozen and name in vars(self) and name in getattr(type(self), "__dataclass_fields__", ()):
            raise FrozenSpecError(
                f"{type(self).__name__} is a value that cannot be changed: make another one, as in "
                f"dataclasses.replace(spec, {name}=...)"
            )

    def _parsed(self, placements: Sequence[PlacementLike] | None) -> Sequence[RemoteDevice]:
        parsed = all_ranks() if placements is None else parse_all(placements)
        if not parsed:
            raise SpecError(f"{type(self).__name__} needs at least one placement")
        if placements is not None and all(type(one) is str for one in placements):
            vars(self)["_seen"] = list(parsed), said_by(parsed), _of_names(tuple(map(str, placements)))
        else:
            vars(self)["_seen"] = places_of_list(parsed)  # now: the caller may change the objects later
        return parsed if settings.current().mutable_specs else tuple(parsed)

    @property
    def _places(self) -> Places:
        """The placements in their frozen form, which is made anew where the list, or one of them, was changed."""
        seen: Seen | None = vars(self).get("_seen")
        if seen is None or (isinstance(self.placements, list) and (seen[0] != self.placements or self._was_changed)):
            seen = vars(self)["_seen"] = places_of_list(self.placements)
        return seen[2]

    @property
    def _was_changed(self) -> bool:
        return has_changed(vars(self)["_seen"], self.placements)

    def _said(self) -> dict[str, Any]:
        """What the spec says besides its placements, by name."""
        return {name: value for name, value in vars(self).items() if name not in ("placements", "_seen")}

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._said() == other._said() and self._places == other._places

    def __hash__(self) -> int:
        return hash((type(self), self._places))  # what a subclass says besides may have no hash, or one like 1 and 1.0

    def __repr__(self) -> str:
        named = [f"{name}={value!r}" for name, value in self._said().items()]
        return f"{type(self).__name__}({', '.join([*named, f'placements={listed_places(self.placements)}'])})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_seen"}


def listed_places(placements: Sequence[RemoteDevice]) -> str:
    """Placements as one writes them, of many the first ones."""
    shown = ", ".join(repr(str(placement)) for placement in placements[:MOST_SHOWN])
    more = len(placements) - MOST_SHOWN
    return f"[{shown}]" if more <= 0 else f"[{shown}, … and {more} more]"


# A list of placements, what they said if they are few, and their frozen form.
Seen = tuple[list[RemoteDevice], list[Any], Places]

MOST_SAID = 256
MOST_SHOWN = 16  # in a text
MOST_LISTS = 16

_lists: dict[tuple[int, ...], Seen] = {}  # the last ones, by the objects in them: several specs of a job have the same


def places_of_list(placements: Sequence[RemoteDevice]) -> Seen:
    """The frozen form of these placements, and by what to tell later whether it still holds."""
    key = tuple(map(id, placements))
    found = _lists.get(key)
    if found is None or has_changed(found, placements):
        if len(_lists) >= MOST_LISTS:
            _lists.clear()
        found = _lists[key] = list(placements), said_by(placements), Places.of(placements)
    return found


def has_changed(seen: Seen, placements: Sequence[RemoteDevice]) -> bool:
    """Whether one of these placements, which were seen before, says something else now."""
    return seen[1] != said_by(placements)


def said_by(placements: Sequence[RemoteDevice]) -> list[Any]:
    """What each of a few placements says: other libraries change the objects. Nobody does so to thousands of them."""
    if len(placements) > MOST_SAID:
        return []
    return [(one.rank(), one.device(), one.worker_name()) for one in placements]


@lru_cache(maxsize=64)
def _of_names(names: tuple[str, ...]) -> Places:
    """Of placements that were given before: most specs of a job name all of its ranks."""
    return Places.of(parse_all(names))
