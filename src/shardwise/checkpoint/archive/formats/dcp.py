"""Folders of `torch.distributed.checkpoint`: a pickle that says which chunk is where, and files of chunks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from shardwise.checkpoint.archive.formats.assembly import (
    Chunk,
    NumberedFiles,
    assemble_tensor,
    parse_counts,
    require_file_name,
)
from shardwise.checkpoint.archive.formats.nested import TensorNames, state_from_leaves, with_stored_tensors
from shardwise.checkpoint.archive.formats.safe_pickle import GlobalName, PickledCall, read_pickle
from shardwise.checkpoint.archive.formats.torch_save import (
    DTYPE_NAMES,
    SIZE,
    SavedTensor,
    find_tensor,
    load_value,
    parse_sizes,
)
from shardwise.checkpoint.archive.state_tree import Path
from shardwise.checkpoint.archive.stored import FileLocation, Index, StoredTensor
from shardwise.checkpoint.storage.protocol import Storage, read_file
from shardwise.errors import CheckpointError

FORMAT = "torch.distributed.checkpoint"
METADATA = ".metadata"
OF_ONE_RANK = re.compile(r"__\d+\.metadata")

_MODULE = "torch.distributed.checkpoint.metadata"
_WHOLE, _TENSOR, _VALUE, _CHUNK, _INDEX, _PROPERTIES = (
    GlobalName(_MODULE, name)
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "TensorProperties",
    )
)
_INFO = GlobalName("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_OLD = "torch.distributed._shard.sharded_tensor.metadata"  # where torch had them before 2.3
_OLD_PROPERTIES = GlobalName(_OLD, "TensorProperties")
KNOWN = frozenset(
    {
        *(_WHOLE, _TENSOR, _VALUE, _CHUNK, _INDEX, _PROPERTIES, _INFO, _OLD_PROPERTIES, SIZE),
        *DTYPE_NAMES,
        GlobalName(_MODULE, "StorageMeta"),
        GlobalName(_MODULE, "_MEM_FORMAT_ENCODING"),
        GlobalName(_OLD, "MEM_FORMAT_ENCODING"),
        GlobalName("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
        GlobalName("torch.serialization", "_get_layout"),
        GlobalName("collections", "OrderedDict"),
        *(
            GlobalName(module, f"{kind}Path")
            for module in ("pathlib", "pathlib._local")
            for kind in ("Posix", "Windows")
        ),
        *(
            GlobalName(module, f"Pure{kind}Path")
            for module in ("pathlib", "pathlib._local")
            for kind in ("Posix", "Windows")
        ),
    }
)


class _ByteRange(NamedTuple):
    """The bytes of a file that hold a chunk or a value."""

    file: str
    begin: int
    length: int


# By name and offsets (None for a value): the bytes, or why they cannot be read.
ByteRanges = Mapping[tuple[str, tuple[int, ...] | None], _ByteRange | str]


def is_here(names: Collection[str]) -> bool:
    """Whether a folder with these files is such a checkpoint."""
    return METADATA in names or any(map(OF_ONE_RANK.fullmatch, names))


def build_index(storage: Storage) -> Index:
    """The index of a folder. Reads the metadata, the zip directories and the values that are no tensors."""
    if METADATA not in storage.names():
        raise CheckpointError(
            f"'{storage}' has no '{METADATA}' but one of each rank: it was saved with use_collectives=False, where the "
            "states of the ranks have nothing to do with each other"
        )
    text = read_file(storage, METADATA)
    what = f"'{METADATA}' of '{storage}'"
    metadata = _state(read_pickle(text, KNOWN, what), _WHOLE, what)
    entries = _dict(metadata.get("state_dict_metadata"), "state_dict_metadata")
    ranges = _byte_ranges(_dict(metadata.get("storage_data"), "storage_data"))
    paths = _paths(metadata.get("planner_data"), entries)
    tensors = {name: _tensor_record(name, entry, ranges) for name, entry in entries.items() if not _is_value(entry)}
    names, leaves = TensorNames(), list[tuple[Path, Any]]()
    with NumberedFiles(storage) as files:
        places = _locate_chunks(tensors.values(), files)
        for name, path in paths.items():
            leaf: Any
            if name in tensors:
                leaf = names.add(tensors[name].stored(names.free(path), places, files))
            else:
                at = _byte_range(name, None, ranges)
                value = load_value(files.opened(at.file), at.begin, at.length, f"value '{name:.200}'")
                leaf = with_stored_tensors(value, path, names, nbytes=at.length)
            leaves.append((path, leaf))
        state = state_from_leaves(leaves)
    return Index(hashlib.blake2b(text, digest_size=8).hexdigest(), files.sizes, names.tensors, state, FORMAT)


class _TensorRecord(NamedTuple):
    """A tensor in the metadata: its boxes by offsets and sizes, each with its byte range."""

    fqn: str
    dtype: torch.dtype
    size: tuple[int, ...]
    chunks: list[tuple[tuple[int, ...], tuple[int, ...], _ByteRange]]

    def stored(
        self, name: str, places: Mapping[_ByteRange, SavedTensor | torch.Tensor], files: NumberedFiles
    ) -> StoredTensor:
        """The stored tensor, given where its chunks were found."""
        chunks = []
        for offsets, sizes, at in self.chunks:
            found = places[at]
            if isinstance(found, torch.Tensor):
                chunks.append(Chunk(offsets, sizes, found))
                continue
            _require_same(found, self.dtype, sizes, f"tensor '{self.fqn:.200}'")
            chunks.append(Chunk(offsets, sizes, FileLocation(at.file, found.begin)))
        return assemble_tensor(name, self.dtype, self.size, chunks, files)


def _locate_chunks(
    tensors: Collection[_TensorRecord], files: NumberedFiles
) -> dict[_ByteRange, SavedTensor | torch.Tensor]:
    """Where the data of all chunks is. Sorted by file, so that each file is opened once."""
    wanted = {at: tensor.fqn for tensor in tensors for _, _, at in tensor.chunks}
    return {
        at: find_tensor(files.opened(at.file), at.begin, at.length, f"tensor '{fqn:.200}' in '{at.file}'")
        for at, fqn in sorted(wanted.items())
    }


def _tensor_record(fqn: str, entry: Any, ranges: ByteRanges) -> _TensorRecord:
    what = f"tensor '{fqn:.200}'"
    words = _state(entry, _TENSOR, what)
    size = parse_sizes(words.get("size"), f"the size of {what}")
    dtype = _dtype(words.get("properties"), what)
    records = words.get("chunks")
    if not isinstance(records, list):
        raise CheckpointError(f"{what} has no list of chunks")
    boxes = dict.fromkeys(_box(record, what) for record in records)
    chunks = []
    for offsets, sizes in boxes:
        if all(sizes):
            known = len(boxes) > 1 or (fqn, offsets) in ranges
            chunks.append((offsets, sizes, _byte_range(fqn, offsets if known else None, ranges)))
    return _TensorRecord(fqn, dtype, size, chunks)


def _is_value(entry: Any) -> bool:
    return isinstance(entry, PickledCall) and entry.kind == _VALUE


def _require_same(found: SavedTensor, dtype: torch.dtype, sizes: tuple[int, ...], what: str) -> None:
    if (found.dtype, found.sizes) != (dtype, sizes):
        raise CheckpointError(
            f"a chunk of {what} should be {dtype} of size {list(sizes)}; its file holds {found.dtype} of size "
            f"{list(found.sizes)}"
        )


def _box(record: Any, what: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    words = _state(record, _CHUNK, f"a chunk of {what}")
    return parse_sizes(words.get("offsets"), f"offsets of {what}"), parse_sizes(words.get("sizes"), f"sizes of {what}")


def _dtype(properties: Any, what: str) -> torch.dtype:
    if isinstance(properties, PickledCall) and properties.kind in (_PROPERTIES, _OLD_PROPERTIES):
        state = properties.state
        found = state[0] if isinstance(state, tuple) and state else state.get("dtype") if type(state) is dict else None
        if isinstance(found, GlobalName) and found in DTYPE_NAMES:
            return DTYPE_NAMES[found]
    raise CheckpointError(f"{what} is of an unknown dtype")


def _byte_ranges(storage_data: Mapping[Any, Any]) -> ByteRanges:
    """The byte range of each entry of the metadata."""
    found: dict[tuple[str, tuple[int, ...] | None], _ByteRange | str] = {}
    for key, info in storage_data.items():
        index = _state(key, _INDEX, "an entry of storage_data")
        fqn, offset = index.get("fqn"), index.get("offset")
        if not isinstance(fqn, str):
            raise CheckpointError("an entry of storage_data has a name that is no string")
        offsets = None if offset is None else parse_sizes(offset, f"offsets of '{fqn:.200}'")
        words = _state(info, _INFO, f"the place of '{fqn:.200}'")
        if words.get("transform_descriptors"):
            kinds = [kind for kind in _sequence(words["transform_descriptors"]) if isinstance(kind, str)]
            found[fqn, offsets] = f"is compressed or changed ({', '.join(kinds)[:100]})"
            continue
        begin, length = parse_counts([words.get("offset"), words.get("length")], f"the place of '{fqn:.200}'")
        file = require_file_name(words.get("relative_path"))
        if "/" in file:
            raise CheckpointError(f"'{file:.100}' is no name of a file within the folder")
        found[fqn, offsets] = _ByteRange(file, begin, length)
    return found


def _byte_range(fqn: str, offsets: tuple[int, ...] | None, ranges: ByteRanges) -> _ByteRange:
    found = ranges.get((fqn, offsets))
    if found is None:
        where = "" if offsets is None else f" at {list(offsets)}"
        raise CheckpointError(f"the checkpoint is damaged: it does not say where '{fqn:.200}'{where} is")
    if isinstance(found, str):
        raise CheckpointError(f"'{fqn:.200}' {found}: save it without extensions, for it can be read as a whole only")
    return found


def _paths(planner_data: Any, entries: Mapping[Any, Any]) -> dict[str, Path]:
    """The path of each entry in the state: from the planner's data, else its name."""
    if not all(isinstance(name, str) for name in entries):
        raise CheckpointError(f"'{METADATA}' has a name that is no string")
    if planner_data is None:
        return {name: (name,) for name in entries}
    mapping, found = _dict(planner_data, "planner_data"), dict[str, Path]()
    for name in entries:
        path = mapping.get(name, (name,))
        if not isinstance(path, tuple) or not path or not all(type(key) in (str, int) for key in path):
            raise CheckpointError("planner_data holds what is no path")
        found[name] = path
    return found


def _state(value: Any, kind: GlobalName, what: str) -> dict[str, Any]:
    """The attributes of an object of this class."""
    if not isinstance(value, PickledCall) or value.kind != kind:
        raise CheckpointError(f"{what:.300} should be a {kind.name}")
    if value.state is None and not value.args:
        return {}
    if type(value.state) is not dict:
        raise CheckpointError(f"{what:.300} is a {kind.name} that is garbled")
    return value.state


def _dict(value: Any, what: str) -> Mapping[Any, Any]:
    if isinstance(value, PickledCall) and value.kind == ("collections", "OrderedDict") and not value.args:
        value = value.state or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"'{METADATA}' is damaged: its {what} is not a dict")
    return value


def _sequence(value: Any) -> Iterator[Any]:
    return iter(value if isinstance(value, list | tuple) else [value])
