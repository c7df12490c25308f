"""What is stored: tensors in boxes, each of which lies at some byte of some file, whatever the format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from shardwise.geometry import IntArray
from shardwise.layout import Layout
from shardwise.placement import Placement


class Spot(NamedTuple):
    """Where the bytes of a box are, in row-major order."""

    file: str
    begin: int
    sums: IntArray | None = None  # checksums of its blocks, where there are any


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in an archive. Its boxes make it up, each element once.

    The ranks of the layout are numbers of files, from which a transfer can begin.
    """

    name: str
    dtype: torch.dtype
    size: torch.Size
    layout: Layout
    # Where each box is: a spot, or a tensor in memory. None where the headers of the files tell.
    spots: tuple[Spot | torch.Tensor, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.size.numel() * self.dtype.itemsize

    def box(self, row: int) -> tuple[list[int], list[int]]:
        """The offsets and the sizes of one of its boxes."""
        if len(self.layout) == 1:
            return [0] * len(self.size), list(self.size)
        box = self.layout.at([row])
        return box.offsets[0].tolist(), box.sizes[0].tolist()


@lru_cache(maxsize=1024)  # models have many tensors of few sizes
def in_one(size: torch.Size, rank: int) -> Layout:
    """The layout of a tensor that is whole on one rank, or in one file."""
    return Layout.whole(size, [Placement(torch.device("cpu"), rank)])


@dataclass(frozen=True, eq=False)
class Index:
    """All that an archive says of itself.

    ``state`` is the state that was saved, with a `StoredTensor` for each tensor. Tensors that were tied, under two
    names but the same, are one.
    """

    id: str
    files: Mapping[str, int]  # bytes of each, by the names that spots use
    tensors: Mapping[str, StoredTensor]
    state: Any
    format: str = "shardwise"
    sums: Mapping[str, int] | None = None  # of each file, the checksum of its header and its table of checksums

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The files by their numbers, which layouts use."""
        return tuple(self.files)

    def files_of(self, tensor: StoredTensor) -> tuple[str, ...]:
        """The files that hold any of a tensor, each once; none where it is in memory."""
        if tensor.spots is not None:
            return tuple(dict.fromkeys(spot.file for spot in tensor.spots if isinstance(spot, Spot)))
        filled = tensor.layout.pattern.filled
        return tuple(dict.fromkeys(self.names[number] for number in tensor.layout.ranks[filled].tolist()))
