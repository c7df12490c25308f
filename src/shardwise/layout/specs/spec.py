"""The base of every sharding spec, and of placements that are named by a spec of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch

from shardwise import settings
from shardwise.errors import FrozenSpecError, SpecError
from shardwise.layout.layout import Layout
from shardwise.layout.metadata import ShardedTensorMetadata, TensorProperties
from shardwise.layout.placement import PlacementLike, RemoteDevice, all_ranks, parse_placement, parse_placements
from shardwise.layout.places import Places


class PlacementSpec(ABC):  # noqa: B024 - an open base, nothing to implement
    """Base of specs that say where something is placed."""


@dataclass
class DevicePlacementSpec(PlacementSpec):
    """Something placed on one device of one process."""

    device: RemoteDevice

    def __post_init__(self) -> None:
        self.device = parse_placement(self.device)


class ShardingSpec(ABC):
    """Base of all sharding specs: a rule that cuts a tensor of some size into boxes on ranks.

    A spec of your own implements `build_metadata`; everything else follows from it. `layout(size)` is its answer for a
    size, without communication, or an error that says why it has none::

        >>> shardwise.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]).layout((5, 4)).boxes.sizes.tolist()
        [[3, 4], [2, 4]]
    """

    _scatter: ClassVar[Callable[..., Any]]  # set by `shardwise.tensor`, which no layout imports

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # A class that overrides `build_metadata` alone gets its layouts from there, not from a base class.
        super().__init_subclass__(**kwargs)
        if "build_metadata" in vars(cls) and "layout" not in vars(cls):
            cls.layout = ShardingSpec.layout  # type: ignore[method-assign] # on purpose

    @abstractmethod
    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """The shards of a tensor of this size, as new records. Needs no communication."""

    def layout(self, size: Sequence[int]) -> Layout:
        """The boxes of a tensor of this size, as the frozen layout that the library works with."""
        metadata = self.build_metadata(torch.Size(size), TensorProperties())
        return Layout.from_metadata(metadata.shards_metadata, metadata.size)

    def shard(self, tensor: torch.Tensor, src_rank: int = 0, process_group: Any = None) -> Any:
        """The tensor that the group's rank ``src_rank`` has, cut by this spec: see `shard_tensor`.

        A class may have its own; `shard_tensor` then asks it, on every rank of the group.
        """
        return ShardingSpec._scatter(tensor, self, src_rank, process_group)

    def _plain_arguments(self) -> tuple[Any, ...] | None:
        """Constructor arguments made of plain values only, so that `torch.load` can rebuild the spec safely."""
        return None

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A subclass may have more fields than its base has arguments: without arguments of its own, pickle it as usual.
        arguments = self._plain_arguments() if "_plain_arguments" in vars(type(self)) else None
        return super().__reduce_ex__(protocol) if arguments is None else (type(self), arguments)


class LayoutShardingSpec(ShardingSpec):
    """Base of the library's own specs: they make layouts, and the records follow from the layout."""

    @abstractmethod
    def layout(self, size: Sequence[int]) -> Layout:
        """The boxes of a tensor of this size."""

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """The boxes of a tensor of this size, as new records."""
        return self.layout(tensor_sizes).metadata(tensor_properties)


class PlacedShardingSpec(LayoutShardingSpec):
    """Base of specs with a list of placements: values, hashed and compared by their fields.

    A spec that is made on the drop-in can be changed, as in the old system: placements are parsed when assigned.
    """

    placements: Sequence[RemoteDevice]

    def __setattr__(self, name: str, value: Any) -> None:
        self._require_free(name)
        super().__setattr__(name, self._parsed(value) if name == "placements" else value)

    def __delattr__(self, name: str) -> None:
        self._require_free(name)
        super().__delattr__(name)

    def _require_free(self, name: str) -> None:
        """Raise if the attribute is a field of a frozen spec; a frozen spec has its placements in a tuple."""
        frozen = isinstance(vars(self).get("placements"), tuple)
        if frozen and name in vars(self) and name in getattr(type(self), "__dataclass_fields__", ()):
            raise FrozenSpecError(
                f"{type(self).__name__} is a value that cannot be changed: make another one, as in "
                f"dataclasses.replace(spec, {name}=...)"
            )

    def _parsed(self, placements: Sequence[PlacementLike] | None) -> Sequence[RemoteDevice]:
        parsed = all_ranks() if placements is None else parse_placements(placements)
        if not parsed:
            raise SpecError(f"{type(self).__name__} needs at least one placement")
        if placements is not None and all(type(one) is str for one in placements):
            vars(self)["_cached"] = list(parsed), snapshot(parsed), _places_of_names(tuple(map(str, placements)))
        else:
            vars(self)["_cached"] = parsed_places(parsed)  # now: the caller may change the objects later
        return parsed if settings.current().mutable_specs else tuple(parsed)

    @property
    def _places(self) -> Places:
        """The placements in frozen form, parsed again if the list or one of its placements was changed."""
        cached: ParsedPlaces | None = vars(self).get("_cached")
        now = self.placements
        if cached is None or (isinstance(now, list) and (cached[0] != now or has_changed(cached, now))):
            cached = vars(self)["_cached"] = parsed_places(now)
        return cached[2]

    def _other_fields(self) -> dict[str, Any]:
        """The fields besides the placements, by name."""
        return {name: value for name, value in vars(self).items() if name not in ("placements", "_cached")}

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._other_fields() == other._other_fields() and self._places == other._places

    def __hash__(self) -> int:
        return hash((type(self), self._places))  # the fields of a subclass may have no hash, or equal ones as 1 and 1.0

    def __repr__(self) -> str:
        named = [f"{name}={value!r}" for name, value in self._other_fields().items()]
        return f"{type(self).__name__}({', '.join([*named, f'placements={listed_places(self.placements)}'])})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_cached"}


def listed_places(placements: Sequence[RemoteDevice]) -> str:
    """Placements as text; of many the first ones."""
    shown = ", ".join(repr(str(placement)) for placement in placements[:MOST_SHOWN])
    more = len(placements) - MOST_SHOWN
    return f"[{shown}]" if more <= 0 else f"[{shown}, … and {more} more]"


# A list of placements, a snapshot of their fields if they are few, and their frozen form.
ParsedPlaces = tuple[list[RemoteDevice], list[Any], Places]

MOST_COMPARED = 256
MOST_SHOWN = 16  # in a text
MOST_LISTS = 16

_lists: dict[tuple[int, ...], ParsedPlaces] = {}  # the last lists, by the ids of their objects: specs share them


def parsed_places(placements: Sequence[RemoteDevice]) -> ParsedPlaces:
    """The frozen form of these placements, with a snapshot by which `has_changed` compares them later."""
    key = tuple(map(id, placements))
    found = _lists.get(key)
    if found is None or has_changed(found, placements):
        if len(_lists) >= MOST_LISTS:
            _lists.clear()
        found = _lists[key] = list(placements), snapshot(placements), Places.of(placements)
    return found


def has_changed(cached: ParsedPlaces, placements: Sequence[RemoteDevice]) -> bool:
    """Whether one of these placements was changed since it was parsed."""
    return cached[1] != snapshot(placements)


def snapshot(placements: Sequence[RemoteDevice]) -> list[Any]:
    """The fields of each of a few placements: other libraries change the objects, but not thousands of them."""
    if len(placements) > MOST_COMPARED:
        return []
    return [(one.rank(), one.device(), one.worker_name()) for one in placements]


@lru_cache(maxsize=64)
def _places_of_names(names: tuple[str, ...]) -> Places:
    """Cached: most specs of a job name all of its ranks."""
    return Places.of(parse_placements(names))
