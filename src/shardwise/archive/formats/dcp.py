"""Folders of `torch.distributed.checkpoint`: a pickle that says which chunk is where, and files of chunks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from shardwise.archive.formats.assembly import Chunk, assembled, counts
from shardwise.archive.formats.files import Files, require_inside
from shardwise.archive.formats.nested import Names, nested, with_stored
from shardwise.archive.formats.pickle_machine import Made, Name, read_pickle
from shardwise.archive.formats.torch_blob import DTYPE_NAMES, SIZE, Place, find_tensor, load_value, sizes_of
from shardwise.archive.nest import Path
from shardwise.archive.stored import Index, Spot, StoredTensor
from shardwise.archive.whole_bytes import content
from shardwise.errors import CheckpointError
from shardwise.storage.place import Storage

FORMAT = "torch.distributed.checkpoint"
METADATA = ".metadata"
OF_ONE_RANK = re.compile(r"__\d+\.metadata")

_MODULE = "torch.distributed.checkpoint.metadata"
_WHOLE, _TENSOR, _VALUE, _CHUNK, _INDEX, _PROPERTIES = (
    Name(_MODULE, name)
    for name in (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "TensorProperties",
    )
)
_INFO = Name("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_OLD = "torch.distributed._shard.sharded_tensor.metadata"  # where torch had them before 2.3
_OLD_PROPERTIES = Name(_OLD, "TensorProperties")
KNOWN = frozenset(
    {
        *(_WHOLE, _TENSOR, _VALUE, _CHUNK, _INDEX, _PROPERTIES, _INFO, _OLD_PROPERTIES, SIZE),
        *DTYPE_NAMES,
        Name(_MODULE, "StorageMeta"),
        Name(_MODULE, "_MEM_FORMAT_ENCODING"),
        Name(_OLD, "MEM_FORMAT_ENCODING"),
        Name("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
        Name("torch.serialization", "_get_layout"),
        Name("collections", "OrderedDict"),
        *(Name(module, f"{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
        *(Name(module, f"Pure{kind}Path") for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
    }
)


class _Stretch(NamedTuple):
    """Which bytes of which file a chunk or value is."""

    file: str
    begin: int
    length: int


# By name and offsets, of which a value has none; or why it cannot be read.
Stretches = Mapping[tuple[str, tuple[int, ...] | None], _Stretch | str]


def is_here(names: Collection[str]) -> bool:
    """Whether a folder with these files is such a checkpoint."""
    return METADATA in names or any(map(OF_ONE_RANK.fullmatch, names))


def read(storage: Storage) -> Index:
    """What a folder holds. Of its files, the directories are read and the values that are no tensors."""
    if METADATA not in storage.names():
        raise CheckpointError(
            f"'{storage}' has no '{METADATA}' but one of each rank: it was saved with use_collectives=False, where the "
            "states of the ranks have nothing to do with each other"
        )
    text = content(storage, METADATA)
    what = f"'{METADATA}' of '{storage}'"
    metadata = _state(read_pickle(text, KNOWN, what), _WHOLE, what)
    entries = _dict(metadata.get("state_dict_metadata"), "state_dict_metadata")
    stretches = _stretches(_dict(metadata.get("storage_data"), "storage_data"))
    paths = _paths(metadata.get("planner_data"), entries)
    tensors = {name: _listed(name, entry, stretches) for name, entry in entries.items() if not _is_value(entry)}
    names, leaves = Names(), list[tuple[Path, Any]]()
    with Files(storage) as files:
        places = _found(tensors.values(), files)
        for name, path in paths.items():
            leaf: Any
            if name in tensors:
                leaf = names.add(tensors[name].assembled(names.free(path), places, files))
            else:
                at = _stretch(name, None, stretches)
                value = load_value(files.opened(at.file), at.begin, at.length, f"value '{name:.200}'")
                leaf = with_stored(value, path, names, nbytes=at.length)
            leaves.append((path, leaf))
        state = nested(leaves)
    return Index(hashlib.blake2b(text, digest_size=8).hexdigest(), files.sizes, names.tensors, state, FORMAT)


class _Listed(NamedTuple):
    """A tensor as the metadata has it: boxes by offsets and sizes, each with the bytes that it was saved as."""

    fqn: str
    dtype: torch.dtype
    size: tuple[int, ...]
    chunks: list[tuple[tuple[int, ...], tuple[int, ...], _Stretch]]

    def assembled(self, name: str, places: Mapping[_Stretch, Place | torch.Tensor], files: Files) -> StoredTensor:
        """The tensor, whose chunks were found at these places."""
        chunks = []
        for offsets, sizes, at in self.chunks:
            found = places[at]
            if isinstance(found, torch.Tensor):
                chunks.append(Chunk(offsets, sizes, found))
                continue
            _require_same(found, self.dtype, sizes, f"tensor '{self.fqn:.200}'")
            chunks.append(Chunk(offsets, sizes, Spot(at.file, found.begin)))
        return assembled(name, self.dtype, self.size, chunks, files)


def _found(tensors: Collection[_Listed], files: Files) -> dict[_Stretch, Place | torch.Tensor]:
    """Where the data of all chunks is, looked up file by file, so that each is opened once."""
    wanted = {at: tensor.fqn for tensor in tensors for _, _, at in tensor.chunks}
    return {
        at: find_tensor(files.opened(at.file), at.begin, at.length, f"tensor '{fqn:.200}' in '{at.file}'")
        for at, fqn in sorted(wanted.items())
    }


def _listed(fqn: str, entry: Any, stretches: Stretches) -> _Listed:
    what = f"tensor '{fqn:.200}'"
    words = _state(entry, _TENSOR, what)
    size = sizes_of(words.get("size"), f"the size of {what}")
    dtype = _dtype(words.get("properties"), what)
    records = words.get("chunks")
    if not isinstance(records, list):
        raise CheckpointError(f"{what} has no list of chunks")
    boxes = dict.fromkeys(_box(record, what) for record in records)
    chunks = []
    for offsets, sizes in boxes:
        if all(sizes):
            known = len(boxes) > 1 or (fqn, offsets) in stretches
            chunks.append((offsets, sizes, _stretch(fqn, offsets if known else None, stretches)))
    return _Listed(fqn, dtype, size, chunks)


def _is_value(entry: Any) -> bool:
    return isinstance(entry, Made) and entry.kind == _VALUE


def _require_same(found: Place, dtype: torch.dtype, sizes: tuple[int, ...], what: str) -> None:
    if (found.dtype, found.sizes) != (dtype, sizes):
        raise CheckpointError(
            f"a chunk of {what} should be {dtype} of size {list(sizes)}; its file holds {found.dtype} of size "
            f"{list(found.sizes)}"
        )


def _box(record: Any, what: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    words = _state(record, _CHUNK, f"a chunk of {what}")
    return sizes_of(words.get("offsets"), f"offsets of {what}"), sizes_of(words.get("sizes"), f"sizes of {what}")


def _dtype(properties: Any, what: str) -> torch.dtype:
    if isinstance(properties, Made) and properties.kind in (_PROPERTIES, _OLD_PROPERTIES):
        state = properties.state
        found = state[0] if isinstance(state, tuple) and state else state.get("dtype") if type(state) is dict else None
        if isinstance(found, Name) and found in DTYPE_NAMES:
            return DTYPE_NAMES[found]
    raise CheckpointError(f"{what} is of an unknown dtype")


def _stretches(storage_data: Mapping[Any, Any]) -> Stretches:
    """By the name of an entry and its offsets, or None for the offsets."""
    found: dict[tuple[str, tuple[int, ...] | None], _Stretch | str] = {}
    for key, info in storage_data.items():
        index = _state(key, _INDEX, "an entry of storage_data")
        fqn, offset = index.get("fqn"), index.get("offset")
        if not isinstance(fqn, str):
            raise CheckpointError("an entry of storage_data has a name that is no string")
        offsets = None if offset is None else sizes_of(offset, f"offsets of '{fqn:.200}'")
        words = _state(info, _INFO, f"the place of '{fqn:.200}'")
        if words.get("transform_descriptors"):
            kinds = [kind for kind in _sequence(words["transform_descriptors"]) if isinstance(kind, str)]
            found[fqn, offsets] = f"is compressed or changed ({', '.join(kinds)[:100]})"
            continue
        begin, length = counts([words.get("offset"), words.get("length")], f"the place of '{fqn:.200}'")
        file = require_inside(words.get("relative_path"))
        if "/" in file:
            raise CheckpointError(f"'{file:.100}' is no name of a file within the folder")
        found[fqn, offsets] = _Stretch(file, begin, length)
    return found


def _stretch(fqn: str, offsets: tuple[int, ...] | None, stretches: Stretches) -> _Stretch:
    found = stretches.get((fqn, offsets))
    if found is None:
        where = "" if offsets is None else f" at {list(offsets)}"
        raise CheckpointError(f"the checkpoint is damaged: it does not say where '{fqn:.200}'{where} is")
    if isinstance(found, str):
        raise CheckpointError(f"'{fqn:.200}' {found}: save it without extensions, for it can be read as a whole only")
    return found


def _paths(planner_data: Any, entries: Mapping[Any, Any]) -> dict[str, Path]:
    """Where each entry is in the state: as the planner has noted, or under its name."""
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


def _state(value: Any, kind: Name, what: str) -> dict[str, Any]:
    """The attributes of an object of this class."""
    if not isinstance(value, Made) or value.kind != kind:
        raise CheckpointError(f"{what:.300} should be a {kind.name}")
    if value.state is None and not value.args:
        return {}
    if type(value.state) is not dict:
        raise CheckpointError(f"{what:.300} is a {kind.name} that is garbled")
    return value.state


def _dict(value: Any, what: str) -> Mapping[Any, Any]:
    if isinstance(value, Made) and value.kind == ("collections", "OrderedDict") and not value.args:
        value = value.state or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"'{METADATA}' is damaged: its {what} is not a dict")
    return value


def _sequence(value: Any) -> Iterator[Any]:
    return iter(value if isinstance(value, list | tuple) else [value])
