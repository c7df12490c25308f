"""The public records of a sharded tensor. They are mutable, because other libraries change them.

The library parses them into a `shardwise.layout.Layout` once, and never reads them again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import repeat
from typing import Any

import torch

from shardwise.errors import LayoutError
from shardwise.layout.placement import RemoteDevice, parse_placement

MEMORY_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
    "preserve_format": torch.preserve_format,
}


class MemoryFormatEncoding(Enum):
    """The numbers by which pickles of the old system name memory formats."""

    TORCH_CONTIGUOUS_FORMAT = 0
    TORCH_CHANNELS_LAST = 1
    TORCH_PRESERVE_FORMAT = 2

    def decoded(self) -> torch.memory_format:
        """The memory format of this number."""
        return MEMORY_FORMATS[self.name.removeprefix("TORCH_").lower()]


_new = object.__new__


@dataclass(slots=True, init=False)
class ShardMetadata:
    """One shard: where it begins in the tensor, how large it is, and where it is placed.

    >>> ShardMetadata([2, 0], [2, 4], "rank:1/cpu").placement.rank()
    1
    """

    shard_offsets: list[int]
    shard_sizes: list[int]
    placement: RemoteDevice | None

    def __init__(
        self,
        shard_offsets: Sequence[int],
        shard_sizes: Sequence[int],
        placement: str | RemoteDevice | None = None,
    ) -> None:
        self.shard_offsets = offsets = _indices("shard_offsets", shard_offsets)
        self.shard_sizes = sizes = _indices("shard_sizes", shard_sizes)
        self.placement = (
            placement if placement is None or type(placement) is RemoteDevice else parse_placement(placement)
        )
        if len(offsets) != len(sizes):
            raise LayoutError(
                "shard_offsets and shard_sizes should have the same number of elements, "
                f"found {len(offsets)} and {len(sizes)}"
            )

    @classmethod
    def trusted(cls, offsets: list[int], sizes: list[int], placement: RemoteDevice | None) -> ShardMetadata:
        """A record of values that come from a layout and need no checking."""
        self = _new(cls)
        self.shard_offsets = offsets
        self.shard_sizes = sizes
        self.placement = placement
        return self

    @classmethod
    def many(
        cls, offsets: list[list[int]], sizes: list[list[int]], placements: Iterable[RemoteDevice | None]
    ) -> list[ShardMetadata]:
        """Records of values that need no checking, made without a call for each."""
        records = list(map(_new, repeat(cls, len(offsets))))
        for record, offset, size, placement in zip(records, offsets, sizes, placements, strict=True):
            record.shard_offsets = offset
            record.shard_sizes = size
            record.placement = placement
        return records

    def __hash__(self) -> int:
        return hash((tuple(self.shard_offsets), tuple(self.shard_sizes), self.placement))

    def __reduce__(self) -> tuple[Any, ...]:
        placement = None if self.placement is None else str(self.placement)
        return type(self), (self.shard_offsets, self.shard_sizes, placement)


def _indices(name: str, values: Sequence[int]) -> list[int]:
    """A new list of integers that are not negative."""
    try:
        indices = list(values)
        for value in indices:
            if type(value) is not int or value < 0:  # another integer type, such as numpy's, or no integer
                break
        else:
            return indices
        indices = list(map(operator.index, indices))
    except TypeError as error:
        raise LayoutError(f"{name} should be a sequence of integers, found {values!r}") from error
    if min(indices) < 0:
        raise LayoutError(f"{name} should be {'>=0' if name == 'shard_offsets' else '>= 0'}, found {indices}")
    return indices


@dataclass
class TensorProperties:
    """What a shard's tensor is made with, besides its size and device."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> TensorProperties:
        """The properties of a tensor that is there already."""
        return TensorProperties(
            dtype=tensor.dtype,
            layout=tensor.layout,
            requires_grad=tensor.requires_grad,
            memory_format=torch.contiguous_format,
            pin_memory=tensor.is_pinned(),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # A memory format travels by its name: not every version of torch can pickle the object.
        name = next(name for name, value in MEMORY_FORMATS.items() if value is self.memory_format)
        return restore_properties, (self.dtype, self.layout, self.requires_grad, name, self.pin_memory)

    def __setstate__(self, state: tuple[torch.dtype, torch.layout, bool, MemoryFormatEncoding, bool]) -> None:
        # Only pickles of the old system come this way.
        self.dtype, self.layout, self.requires_grad, encoding, self.pin_memory = state
        self.memory_format = encoding.decoded()


def restore_properties(
    dtype: torch.dtype, layout: torch.layout, requires_grad: bool, memory_format: str, pin_memory: bool
) -> TensorProperties:
    """What a pickle of tensor properties calls when it is loaded."""
    return TensorProperties(dtype, layout, requires_grad, MEMORY_FORMATS[memory_format], pin_memory)


@dataclass
class ShardedTensorMetadata:
    """The whole tensor: every shard on every rank, the size, and what the shards are made with."""

    shards_metadata: list[ShardMetadata] = field(default_factory=list)
    size: torch.Size = field(default_factory=lambda: torch.Size([]))
    tensor_properties: TensorProperties = field(default_factory=TensorProperties)
