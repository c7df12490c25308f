"""`write_dcp`: writes a folder that `torch.distributed.checkpoint` reads, to any storage, one chunk at a time."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise.checkpoint.archive.formats.dcp import METADATA
from shardwise.checkpoint.archive.state_tree import Path
from shardwise.checkpoint.storage.protocol import Storage
from shardwise.comm.transfer.views import cut
from shardwise.errors import CheckpointError
from shardwise.torch_private import load_private

StorageInfo = load_private("torch.distributed.checkpoint.filesystem._StorageInfo")
FILE = "__0_0.distcp"
MOST_BYTES = 2**28  # of a chunk; while a chunk is written, memory holds two copies


class TensorLeaf(NamedTuple):
    """A tensor to write. ``read`` gives the box with the given offsets and sizes."""

    dtype: torch.dtype
    size: torch.Size
    read: Callable[[Sequence[int], Sequence[int]], torch.Tensor]


def write_dcp(storage: Storage, leaves: Iterable[tuple[Path, Any]], *, max_bytes: int = MOST_BYTES) -> dict[str, int]:
    """Write a state, given as leaves with their paths, to a folder without a checkpoint; gives the bytes of each file.

    A leaf is a `TensorLeaf` or any other value. A number in a path is an index of a list. A tensor of more than
    ``max_bytes`` is written in several chunks. The metadata is written last: until then, readers find nothing. One
    process writes alone.
    """
    if any(name in storage.names() for name in (FILE, METADATA)):
        raise CheckpointError(f"'{storage}' holds a checkpoint of torch.distributed.checkpoint already")
    writing = _Writing(max_bytes)
    with storage.writing():
        try:
            storage.write(FILE, writing.buffers(leaves))
            metadata = pickle.dumps(writing.metadata())
            storage.replace(METADATA, metadata)
        except BaseException:
            storage.remove([FILE])
            raise
    return {FILE: writing.begin, METADATA: len(metadata)}


@dataclass
class _Writing:
    """What has been written so far."""

    max_bytes: int
    begin: int = 0
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    places: dict[MetadataIndex, Any] = field(default_factory=dict)

    def buffers(self, leaves: Iterable[tuple[Path, Any]]) -> Iterator[memoryview]:
        """The content of the file, generated on demand."""
        for path, leaf in leaves:
            name = ".".join(map(str, path))
            if name in self.entries:
                raise CheckpointError(f"two entries would be called '{name}' in torch.distributed.checkpoint")
            self.paths[name] = path
            if isinstance(leaf, TensorLeaf):
                yield from self._tensor(name, leaf)
            else:
                self.entries[name] = BytesStorageMetadata()
                yield self._saved(MetadataIndex(name), leaf)

    def _tensor(self, name: str, leaf: TensorLeaf) -> Iterator[memoryview]:
        whole = [0] * len(leaf.size), list(leaf.size)
        boxes = [whole]
        if leaf.size.numel():
            boxes = list(cut(whole, max(self.max_bytes // leaf.dtype.itemsize, 1)))
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
        self.entries[name] = TensorStorageMetadata(TensorProperties(leaf.dtype), leaf.size, chunks)
        for number, (offsets, sizes) in enumerate(boxes):
            part = leaf.read(offsets, sizes).contiguous()
            if part.untyped_storage().nbytes() != part.nbytes:
                part = part.clone()  # torch.save writes the whole storage of a view
            yield self._saved(MetadataIndex(name, offsets, number), part)

    def _saved(self, index: MetadataIndex, value: Any) -> memoryview:
        stream = io.BytesIO()
        torch.save(value, stream)
        saved = stream.getbuffer()
        self.places[index] = StorageInfo(FILE, self.begin, saved.nbytes)
        self.begin += saved.nbytes
        return saved

    def metadata(self) -> Metadata:
        """What has been written."""
        return Metadata(self.entries, self.paths, self.places, version=CURRENT_DCP_VERSION)
