"""Folders of safetensors files, as Hugging Face's libraries write them, and single safetensors files."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.checkpoint.archive.formats.assembly import (
    Chunk,
    NumberedFiles,
    assemble_tensor,
    parse_counts,
    parse_json,
    read_weight_map,
)
from shardwise.checkpoint.archive.stored import FileLocation, Index, StoredTensor
from shardwise.checkpoint.archive.tensor_file import DTYPES, ID, MAX_HEADER, METADATA
from shardwise.checkpoint.storage.protocol import Storage, read_range
from shardwise.errors import CheckpointError, DamageError

FORMAT = "safetensors"
SUFFIX = ".safetensors"
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # in files that torch.distributed.checkpoint wrote


@dataclass
class _TensorRecord:
    """One tensor, as the headers of the files describe it."""

    dtype: torch.dtype
    ndim: int
    file: str
    chunks: list[Chunk] = field(default_factory=list)
    is_cut: bool = False


def is_here(names: Collection[str]) -> bool:
    """Whether a folder with these files holds safetensors files."""
    return INDEX in names or any(name.endswith(SUFFIX) for name in names)


def build_index(storage: Storage, file: str | None = None) -> Index:
    """The index of a folder, or of one file in it. Reads the headers of the files.

    The files of a folder are those in its index, else `model.safetensors`, else all files. One name may be in several
    files only if they say which part of the tensor each has, as torch.distributed.checkpoint does.
    """
    digest = hashlib.blake2b(digest_size=8)
    weight_map: Mapping[str, str] | None = None
    if file is not None:
        wanted: Sequence[str] = [file]
    else:
        names = storage.names()
        weight_map = read_weight_map(storage, INDEX) if INDEX in names else None
        if weight_map is not None:
            wanted = sorted(set(weight_map.values()))
        else:
            wanted = [ONE] if ONE in names else [name for name in names if name.endswith(SUFFIX)]
    if not wanted and weight_map is None:
        raise CheckpointError(f"'{storage}' holds no file that ends with '{SUFFIX}'")
    found: dict[str, _TensorRecord] = {}
    with NumberedFiles(storage) as files:
        for name in wanted:
            digest.update(_add(name, files, found))
        if weight_map is not None:
            _require_as_listed(weight_map, found, storage)
        tensors = {name: _tensor(name, tensor, files) for name, tensor in found.items()}
    return Index(digest.hexdigest(), files.sizes, tensors, dict(tensors), FORMAT)


def _require_as_listed(weight_map: Mapping[str, str], found: Mapping[str, _TensorRecord], storage: Storage) -> None:
    for name, file in weight_map.items():
        if name not in found or (not found[name].is_cut and found[name].file != file):
            raise CheckpointError(
                f"'{storage}' is damaged: '{INDEX}' says that '{name:.200}' is in '{file}'; it is not"
            )


def _add(name: str, files: NumberedFiles, found: dict[str, _TensorRecord]) -> bytes:
    """Record the tensors of one file; gives its header, for a digest."""
    file = files.opened(name)
    length = int.from_bytes(read_range(file, 0, 8), "little") if file.size >= 8 else 0
    if not 0 < length <= min(file.size - 8, MAX_HEADER):
        raise CheckpointError(f"'{name}' is not a safetensors file: its header does not fit into {file.size:,} bytes")
    text = read_range(file, 8, length)
    words = parse_json(text, f"the header of '{name}'")
    metadata = words.pop(METADATA, None) or {}
    if not isinstance(metadata, dict) or ID in metadata:
        raise CheckpointError(f"'{name}' is part of a checkpoint of shardwise: give the folder, with its index")
    cuts = _cuts(metadata.get(SHARDING), name)
    end = 0
    for key, entry in words.items():
        chunk, dtype, stop = _chunk(key, entry, name, 8 + length, None if cuts is None else cuts.get(key))
        end = max(end, stop)
        tensor = found.setdefault(key, _TensorRecord(dtype, len(chunk.sizes), name, is_cut=cuts is not None))
        if tensor.chunks and not (cuts is not None and tensor.is_cut):
            raise CheckpointError(f"'{key:.200}' is in two files, '{tensor.file}' and '{name}': which one counts?")
        if (tensor.dtype, tensor.ndim) != (dtype, len(chunk.sizes)):
            raise CheckpointError(f"'{key:.200}' is of another dtype or number of dims in '{tensor.file}' and '{name}'")
        tensor.chunks.append(chunk)
    if 8 + length + end > file.size:
        raise DamageError(
            f"'{name}' is damaged: it is cut off or changed, it has {file.size:,} bytes and its header speaks of "
            f"{8 + length + end:,}. Copy it again, or take another checkpoint"
        )
    if 8 + length + end < file.size:
        raise DamageError(f"'{name}' is damaged: its header does not speak of all its {file.size:,} bytes")
    return text


def _chunk(key: str, entry: Any, file: str, begin: int, cut: Any) -> tuple[Chunk, torch.dtype, int]:
    what = f"'{key:.200}' in '{file}'"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{what} is garbled")
    word = entry.get("dtype")
    dtype = DTYPES.get(word) if isinstance(word, str) else None
    if dtype is None:
        raise CheckpointError(f"{what} is of dtype {f'{word!r:.50}' if isinstance(word, str) else '?'}: it is unknown")
    sizes = parse_counts(entry.get("shape"), f"the shape of {what}")
    span = parse_counts(entry.get("data_offsets"), f"the data_offsets of {what}")
    nbytes = dtype.itemsize
    for size in sizes:
        nbytes *= size
    if len(span) != 2 or span[1] - span[0] != nbytes:
        raise CheckpointError(f"{what} should have {nbytes:,} bytes, for it is {dtype} of size {list(sizes)}")
    offsets = (0,) * len(sizes) if cut is None else parse_counts(cut, f"the offsets of {what}")
    if len(offsets) != len(sizes):
        raise CheckpointError(f"{what} has {len(sizes)} dims and offsets in {len(offsets)}")
    return Chunk(offsets, sizes, FileLocation(file, begin + span[0])), dtype, span[1]


def _tensor(name: str, found: _TensorRecord, files: NumberedFiles) -> StoredTensor:
    size = [max(chunk.offsets[dim] + chunk.sizes[dim] for chunk in found.chunks) for dim in range(found.ndim)]
    return assemble_tensor(name, found.dtype, size, found.chunks, files)


def _cuts(text: Any, name: str) -> Mapping[str, Any] | None:
    """The offsets of each tensor in a file of torch.distributed.checkpoint; None for any other file."""
    if text is None:
        return None
    if not isinstance(text, str):
        raise CheckpointError(f"the header of '{name}' is garbled")
    words = parse_json(text.encode(), f"the header of '{name}'")
    return {key: entry.get(OFFSETS) if isinstance(entry, dict) else 0 for key, entry in words.items()}
