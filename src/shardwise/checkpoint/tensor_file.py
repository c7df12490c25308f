"""One file of tensors in the safetensors format: a length, a header in JSON, then the bytes of all tensors in order."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.checkpoint.storage import Read
from shardwise.errors import CheckpointError

# Where the format has no word for a dtype (or only its latest readers know it), the file holds the bytes of each
# element as a last dim of U8, and the index knows the dtype.
WORDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
ALIGNMENT = 64  # of the first tensor, so that a memory map of the file can be computed with
MOST_HEADER = 100_000_000  # bytes; readers of the format refuse more
METADATA = "__metadata__"  # the one key that is no tensor
ID = "shardwise"  # under which the metadata names the checkpoint that the file belongs to


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file."""

    dtype: torch.dtype
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize

    def words(self) -> tuple[str, list[int]]:
        """The dtype and shape that the file says it has."""
        word = WORDS.get(self.dtype)
        return ("U8", [*self.sizes, self.dtype.itemsize]) if word is None else (word, list(self.sizes))


def header_of(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """What a file with these tensors begins with; their bytes follow, in this order and without gaps."""
    words: dict[str, Any] = {METADATA: dict(metadata)}
    position = 0
    for key, entry in entries.items():
        dtype, shape = entry.words()
        words[key] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + entry.nbytes]}
        position += entry.nbytes
    text = json.dumps(words, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MOST_HEADER:
        raise CheckpointError(f"a file of {len(entries):,} shards is beyond the safetensors format: save on more ranks")
    return len(text).to_bytes(8, "little") + text


@dataclass(frozen=True)
class Header:
    """The header of a file that was read: where its bytes begin, and what it says of each tensor."""

    file: str
    begin: int
    words: Mapping[str, Any]

    def entry(self, key: str) -> Entry:
        """What the file says of a tensor, or the error that says that torch has no such dtype."""
        found = self.words[key]
        try:
            dtype = next(kind for kind, word in WORDS.items() if word == found["dtype"])
            return Entry(dtype, tuple(int(size) for size in found["shape"]))
        except (StopIteration, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"file '{self.file}' holds '{key}' as {found!r:.200}, which is unknown") from error

    def position(self, key: str, entry: Entry) -> int:
        """The byte at which a tensor begins, or the error that says it is not the tensor that is looked for."""
        dtype, shape = entry.words()
        found = self.words.get(key)
        if not isinstance(found, dict) or (found.get("dtype"), found.get("shape")) != (dtype, shape):
            raise CheckpointError(f"file '{self.file}' should hold '{key}' as {dtype} of shape {shape}; found: {found}")
        begin, end = found["data_offsets"]
        if end - begin != entry.nbytes:
            raise CheckpointError(f"file '{self.file}' says that '{key}' has {end - begin} bytes, not {entry.nbytes}")
        return self.begin + int(begin)


def read_header(read: Read, file: str, size: int, checkpoint: str | None) -> Header:
    """The header of a file of this size that belongs to this checkpoint, or to none; or the error that says why not."""
    length = int.from_bytes(_part(read, 0, 8), "little") if size >= 8 else size
    if not 0 < length <= min(size - 8, MOST_HEADER):
        raise CheckpointError(f"file '{file}' is not a safetensors file: its header does not fit into {size:,} bytes")
    try:
        words = json.loads(_part(read, 8, length))
        known = words.pop(METADATA, {}).get(ID)
        ends = [_end(entry["data_offsets"]) for entry in words.values()]
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise CheckpointError(f"file '{file}' is not a safetensors file: {error!r}") from error
    if known != checkpoint:
        raise CheckpointError(
            f"file '{file}' does not belong to this checkpoint, but to {known or 'none'}: the files of two checkpoints "
            "were mixed"
            if checkpoint is not None
            else f"file '{file}' is part of a checkpoint of shardwise: shardwise.load reads it"
        )
    if max(ends, default=0) != size - 8 - length:
        raise CheckpointError(f"file '{file}' is damaged: its header does not speak of all its {size:,} bytes")
    return Header(file, 8 + length, words)


def _part(read: Read, begin: int, length: int) -> bytes:
    buffer = bytearray(length)
    read(begin, [memoryview(buffer)])
    return bytes(buffer)


def _end(offsets: Sequence[int]) -> int:
    begin, end = offsets
    if not (type(begin) is type(end) is int and 0 <= begin <= end):
        raise ValueError(f"data_offsets {offsets!r:.100}")
    return end
