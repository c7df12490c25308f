"""The base of every sharding spec, and of placements that are named by a spec of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from shardwise.dispatch import registry
from shardwise.errors import SpecError
from shardwise.layout import Layout, Places
from shardwise.metadata import ShardedTensorMetadata, TensorProperties
from shardwise.placement import PlacementLike, RemoteDevice, parse, parse_all


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

    A spec of your own implements `build_metadata`; everything else follows from it.
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
        """The tensor that the group's rank ``src_rank`` has, cut by this spec: see `shardwise.shard_tensor`.

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
    """Base of specs with a list of placements, which are parsed whenever a list is assigned."""

    placements: list[RemoteDevice]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, self._parsed(value) if name == "placements" else value)

    def _parsed(self, placements: Sequence[PlacementLike]) -> list[RemoteDevice]:
        parsed = parse_all(placements)
        if not parsed:
            raise SpecError(f"{type(self).__name__} needs at least one placement")
        if all(type(one) is str for one in placements):
            vars(self)["_seen"] = list(parsed), said_by(parsed), _of_names(tuple(map(str, placements)))
        return parsed

    @property
    def _places(self) -> Places:
        """The placements in their frozen form, which is made anew when the list, or one of them, was changed."""
        seen: Seen | None = vars(self).get("_seen")
        if seen is None or seen[0] != self.placements or has_changed(seen, self.placements):
            seen = vars(self)["_seen"] = places_of_list(self.placements)
        return seen[2]

    def __repr__(self) -> str:
        shown: list[Any] = self.placements[:MOST_SHOWN]
        more = len(self.placements) - MOST_SHOWN
        named = [f"{name}={value!r}" for name, value in vars(self).items() if name not in ("placements", "_seen")]
        text = f"{shown!r}" if more <= 0 else f"{str(shown)[:-1]}, … and {more} more]"
        return f"{type(self).__name__}({', '.join([*named, f'placements={text}'])})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_seen"}


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
