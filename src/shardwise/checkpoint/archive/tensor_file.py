"""A file of tensors in the safetensors format: a length, a header in JSON, then the bytes of all tensors in order.

In files that shardwise writes, the last tensor is a table of checksums, one for each block of the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from shardwise.checkpoint.archive.blocks import Blocks, checksum
from shardwise.checkpoint.storage import OpenFile
from shardwise.checkpoint.storage.protocol import read_range
from shardwise.errors import CheckpointError, DamageError
from shardwise.layout.geometry import IntArray

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}  # by their names in the format
LATEST = frozenset({"F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "C64"})  # names that only recent readers know
# Tensors of other dtypes are written as U8 with a last dim for the bytes of each element; the index has the dtype.
WRITTEN = {dtype: word for word, dtype in DTYPES.items() if word not in LATEST}
ALIGNMENT = 64  # of the first tensor, so that a memory-mapped file can be used directly
MAX_HEADER = 100_000_000  # bytes; readers of the format refuse more
METADATA = "__metadata__"  # the only key that is no tensor
ID = "shardwise"  # the metadata key of the checkpoint's id
CHECKSUMS = "__checksums__"  # the key of the checksum table, a U64 for each block


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file."""

    dtype: torch.dtype
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize

    def words(self) -> tuple[str, list[int]]:
        """The dtype and shape in the header."""
        word = WRITTEN.get(self.dtype)
        return ("U8", [*self.sizes, self.dtype.itemsize]) if word is None else (word, list(self.sizes))


def encode_header(entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> bytes:
    """The length and header of a file; the bytes of the tensors follow, in this order and without gaps."""
    words: dict[str, Any] = {METADATA: dict(metadata)}
    position = 0
    for key, entry in entries.items():
        dtype, shape = entry.words()
        words[key] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + entry.nbytes]}
        position += entry.nbytes
    text = json.dumps(words, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise CheckpointError(f"a file of {len(entries):,} shards is beyond the safetensors format: save on more ranks")
    return len(text).to_bytes(8, "little") + text


def with_checksum_entry(entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The entries with that of the checksum table at the end."""
    count = sum(Blocks.of(entry.sizes, entry.dtype.itemsize).count for entry in entries.values())
    return {**entries, CHECKSUMS: TensorEntry(torch.uint64, (count,))}


def encode_checksums(sums: Sequence[int]) -> bytes:
    """The bytes of a checksum table."""
    return np.array(sums, dtype="<u8").tobytes()


@dataclass(frozen=True, eq=False)
class Header:
    """A parsed header: the first byte after it, and the entry of each tensor."""

    file: str
    begin: int
    words: Mapping[str, Any]
    table: IntArray  # of the checksums of all blocks

    def _entry(self, key: str) -> TensorEntry:
        """The entry of a tensor; raises where it is malformed."""
        found = self.words[key]
        try:
            dtype, sizes = DTYPES[found["dtype"]], tuple(found["shape"])
        except (KeyError, TypeError) as error:
            raise DamageError(f"file '{self.file}' holds '{key}' as {found!r:.200}, which is unknown") from error
        if not all(type(size) is int and size >= 0 for size in sizes):
            raise DamageError(f"file '{self.file}' holds '{key}' as {found!r:.200}, which has no size")
        return TensorEntry(dtype, sizes)

    def position(self, key: str, entry: TensorEntry) -> int:
        """The first byte of a tensor; raises unless its entry is the given one."""
        dtype, shape = entry.words()
        found = self.words.get(key)
        if not isinstance(found, dict) or (found.get("dtype"), found.get("shape")) != (dtype, shape):
            raise DamageError(
                f"file '{self.file}' should hold '{key}' as {dtype} of shape {shape}; found: {found!r:.200}"
            )
        begin, end = found["data_offsets"]
        if end - begin != entry.nbytes:
            raise DamageError(f"file '{self.file}' says that '{key}' has {end - begin} bytes, not {entry.nbytes}")
        return self.begin + int(begin)

    def sums(self, key: str) -> IntArray:
        """The checksums of the blocks of a tensor."""
        return self.table[self._blocks[key]]

    @cached_property
    def _blocks(self) -> dict[str, slice]:
        """The part of the table for each tensor."""
        found, begin = {}, 0
        for key in self.words:
            entry = self._entry(key)
            end = begin + Blocks.of(entry.sizes, entry.dtype.itemsize).count
            found[key], begin = slice(begin, end), end
        return found


def read_own_header(file: OpenFile, name: str, checkpoint: str, sum_of_both: int) -> Header:
    """The header of a file of this checkpoint, with its checksum table; ``sum_of_both`` is their checksum."""
    prefix = read_range(file, 0, min(file.size, 8))
    length = int.from_bytes(prefix, "little")
    if not 0 < length <= min(file.size - 8, MAX_HEADER):
        raise DamageError(f"file '{name}' is not a safetensors file: its header does not fit into {file.size:,} bytes")
    text = read_range(file, 8, length)
    words, known = _parsed(text, name, file.size)
    if known != checkpoint:
        raise DamageError(
            f"file '{name}' does not belong to this checkpoint, but to {known or 'none'}: the files of two checkpoints "
            "were mixed"
        )
    begin, end = words.pop(CHECKSUMS, {}).get("data_offsets", (0, 0))
    table = read_range(file, 8 + length + begin, end - begin)
    if checksum(prefix + text + table) != sum_of_both or len(table) % 8:
        raise DamageError(f"file '{name}' is damaged: its header is not what was written")
    return Header(name, 8 + length, words, np.frombuffer(table, dtype="<u8").astype(np.uint64))


def _parsed(text: bytes, name: str, size: int) -> tuple[dict[str, Any], str | None]:
    """The entries of a header, and the id of the checkpoint that it names."""
    try:
        words = json.loads(text)
        known = words.pop(METADATA, {}).get(ID)
        ends = [_end(entry["data_offsets"]) for entry in words.values()]
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        raise DamageError(
            f"file '{name}' is not a safetensors file: its header is garbled ({type(error).__name__})"
        ) from error
    if max(ends, default=0) != size - 8 - len(text):
        raise DamageError(f"file '{name}' is damaged: its header does not speak of all its {size:,} bytes")
    return words, known


def _end(offsets: Sequence[int]) -> int:
    begin, end = offsets
    if not (type(begin) is type(end) is int and 0 <= begin <= end):
        raise ValueError(f"data_offsets {offsets!r:.100}")
    return end
