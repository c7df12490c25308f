"""One file of tensors in the safetensors format: a length, a header in JSON, then the bytes of all tensors in order.

In files of ours the last tensor is a table of the checksums of all others, block by block.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from shardwise.archive.blocks import Blocks, checksum
from shardwise.archive.whole_bytes import part
from shardwise.errors import CheckpointError, DamageError
from shardwise.geometry import IntArray
from shardwise.storage import OpenFile

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
}  # by the words of the format
LATEST = frozenset({"F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "C64"})  # words that only its latest readers know
# Where the format has no word for a dtype, or only its latest readers know it, a file of ours holds the bytes of each
# element as a last dim of U8, and the index knows the dtype.
WRITTEN = {dtype: word for word, dtype in DTYPES.items() if word not in LATEST}
ALIGNMENT = 64  # of the first tensor, so that a memory map of the file can be computed with
MOST_HEADER = 100_000_000  # bytes; readers of the format refuse more
METADATA = "__metadata__"  # the one key that is no tensor
ID = "shardwise"  # under which the metadata names the checkpoint that the file belongs to
SUMS = "__checksums__"  # the key of the table, a U64 for each block


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
        word = WRITTEN.get(self.dtype)
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


def with_sums(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """The entries of a file of ours: those of the tensors, and that of the table behind them."""
    count = sum(Blocks.of(entry.sizes, entry.dtype.itemsize).count for entry in entries.values())
    return {**entries, SUMS: Entry(torch.uint64, (count,))}


def table_of(sums: Sequence[int]) -> bytes:
    """The table of a file, as it is written."""
    return np.array(sums, dtype="<u8").tobytes()


@dataclass(frozen=True, eq=False)
class Header:
    """The header of a file that was read: where its bytes begin, and what it says of each tensor."""

    file: str
    begin: int
    words: Mapping[str, Any]
    table: IntArray  # the checksums of all blocks

    def _entry(self, key: str) -> Entry:
        """What the file says of a tensor, or the error that says that there is no such thing."""
        found = self.words[key]
        try:
            dtype, sizes = DTYPES[found["dtype"]], tuple(found["shape"])
        except (KeyError, TypeError) as error:
            raise DamageError(f"file '{self.file}' holds '{key}' as {found!r:.200}, which is unknown") from error
        if not all(type(size) is int and size >= 0 for size in sizes):
            raise DamageError(f"file '{self.file}' holds '{key}' as {found!r:.200}, which has no size")
        return Entry(dtype, sizes)

    def position(self, key: str, entry: Entry) -> int:
        """The byte at which a tensor begins, or the error that says it is not the tensor that is looked for."""
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
        """Which part of the table is of which tensor."""
        found, begin = {}, 0
        for key in self.words:
            entry = self._entry(key)
            end = begin + Blocks.of(entry.sizes, entry.dtype.itemsize).count
            found[key], begin = slice(begin, end), end
        return found


def read_own_header(file: OpenFile, name: str, checkpoint: str, sum_of_both: int) -> Header:
    """The header of a file of ours that belongs to this checkpoint, with its table; the checksum is that of both."""
    prefix = part(file, 0, min(file.size, 8))
    length = int.from_bytes(prefix, "little")
    if not 0 < length <= min(file.size - 8, MOST_HEADER):
        raise DamageError(f"file '{name}' is not a safetensors file: its header does not fit into {file.size:,} bytes")
    text = part(file, 8, length)
    words, known = _parsed(text, name, file.size)
    if known != checkpoint:
        raise DamageError(
            f"file '{name}' does not belong to this checkpoint, but to {known or 'none'}: the files of two checkpoints "
            "were mixed"
        )
    begin, end = words.pop(SUMS, {}).get("data_offsets", (0, 0))
    table = part(file, 8 + length + begin, end - begin)
    if checksum(prefix + text + table) != sum_of_both or len(table) % 8:
        raise DamageError(f"file '{name}' is damaged: its header is not what was written")
    return Header(name, 8 + length, words, np.frombuffer(table, dtype="<u8").astype(np.uint64))


def _parsed(text: bytes, name: str, size: int) -> tuple[dict[str, Any], str | None]:
    """The words of a header, and the checkpoint that it says it belongs to."""
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
