"""The index of a checkpoint of any format: stored tensors, and where their boxes lie in files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from shardwise.errors import CheckpointError
from shardwise.layout import Layout
from shardwise.layout.geometry import IntArray
from shardwise.layout.placement import Placement

_NAMES = """
    bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 complex64
    complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
    """
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)}


def dtype_from_name(name: object, tensor: str) -> torch.dtype:
    """The dtype of this name, which never imports anything; ``tensor`` is for the error."""
    found = DTYPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise CheckpointError(f"tensor '{tensor:.200}' is of dtype {name!r:.50}, which is unknown")
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in files."""
    return str(dtype).removeprefix("torch.")


class FileLocation(NamedTuple):
    """Where the bytes of a box begin; they are in row-major order."""

    file: str
    begin: int
    sums: IntArray | None = None  # of the blocks; None in formats without checksums


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in an archive. Each element is in exactly one of its boxes.

    The ranks of ``layout`` are numbers of files.
    """

    name: str
    dtype: torch.dtype
    size: torch.Size
    layout: Layout
    # Of each box: its location, or its values in memory. None in shardwise's format, whose file headers have them.
    locations: tuple[FileLocation | torch.Tensor, ...] | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor."""
        return self.size.numel() * self.dtype.itemsize

    def box(self, row: int) -> tuple[list[int], list[int]]:
        """The offsets and the sizes of a box."""
        if len(self.layout) == 1:
            return [0] * len(self.size), list(self.size)
        box = self.layout.at([row])
        return box.offsets[0].tolist(), box.sizes[0].tolist()


@lru_cache(maxsize=1024)  # many tensors have the same size
def whole_on_rank(size: torch.Size, rank: int) -> Layout:
    """The layout of a tensor that lies whole on one rank, or in one file."""
    return Layout.whole(size, [Placement(torch.device("cpu"), rank)])


@dataclass(frozen=True, eq=False)
class Index:
    """The contents of an archive.

    ``state`` is the state that was saved, with a `StoredTensor` in the place of each tensor. Tied tensors are one
    `StoredTensor` under several names.
    """

    id: str
    files: Mapping[str, int]  # the bytes of each file, by name
    tensors: Mapping[str, StoredTensor]
    state: Any
    format: str = "shardwise"
    sums: Mapping[str, int] | None = None  # of each file's header and checksum table

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The file names by number, as layouts use them."""
        return tuple(self.files)

    def files_of(self, tensor: StoredTensor) -> tuple[str, ...]:
        """The files that hold boxes of a tensor, each once; none for a tensor in memory."""
        if tensor.locations is not None:
            return tuple(
                dict.fromkeys(location.file for location in tensor.locations if isinstance(location, FileLocation))
            )
        filled = tensor.layout.pattern.filled
        return tuple(dict.fromkeys(self.names[number] for number in tensor.layout.ranks[filled].tolist()))
