"""Snapshots of torchsnapshot: a manifest that names every entry of every rank, and files with their bytes."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import torch

from shardwise.checkpoint.archive.formats.assembly import Chunk, NumberedFiles, assemble_tensor, parse_counts
from shardwise.checkpoint.archive.formats.nested import TensorNames, state_from_leaves, with_stored_tensors
from shardwise.checkpoint.archive.formats.torch_save import find_tensor, load_value
from shardwise.checkpoint.archive.state_tree import MAX_DEPTH, Path
from shardwise.checkpoint.archive.stored import DTYPES, FileLocation, Index, StoredTensor
from shardwise.checkpoint.storage.protocol import Storage, read_file
from shardwise.errors import CheckpointError

FORMAT = "torchsnapshot"
METADATA = ".snapshot_metadata"
DICTS, LIST = ("dict", "OrderedDict"), "list"
SHARDED = {"ShardedTensor": "shards", "DTensor": "shards"}
RAW, SAVED = "buffer_protocol", "torch_save"
VALUES: dict[str, Callable[[str], Any]] = {
    "int": int,
    "str": str,
    "bool": lambda text: {"True": True, "False": False}[text],
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "float": lambda text: struct.unpack("d", base64.b64decode(text, validate=True))[0],
}


def is_here(names: Collection[str]) -> bool:
    """Whether a folder with these files is a snapshot."""
    return METADATA in names


def build_index(storage: Storage) -> Index:
    """The index of a snapshot. Reads the manifest, and the values outside the manifest that are no tensors.

    Sharded and replicated entries, and plain values that are the same on all ranks, are in the state once. Others
    are under the number of their rank, as in torchsnapshot's own names: "0/…".
    """
    text = read_file(storage, METADATA)
    words = _parsed(text, f"'{METADATA}' of '{storage}'")
    with NumberedFiles(storage) as files:
        state, names = _Snapshot(words, files, len(text)).state()
        index = hashlib.blake2b(text, digest_size=8).hexdigest()
        return Index(index, files.sizes, names.tensors, state, FORMAT)


@dataclass
class _Snapshot:
    """A parsed manifest."""

    words: Mapping[str, Any]
    files: NumberedFiles
    most: int  # keys and shards that a manifest of this length can list
    keys: dict[Path, Any] = field(default_factory=dict)  # the int key at a path of strings
    containers: dict[Path, str] = field(default_factory=dict)

    def state(self) -> tuple[Any, TensorNames]:
        """The states of all ranks as one, and its tensors by name."""
        manifest, world = self.words.get("manifest"), self.words.get("world_size")
        if not isinstance(manifest, dict) or type(world) is not int or world < 1:
            raise CheckpointError(f"'{METADATA}' is damaged: it has no manifest, or no world_size")
        ranks = self._by_path(manifest, world)
        names, leaves = TensorNames(), list[tuple[Path, Any]]()
        for words, entries in ranks.items():
            kind = entries[min(entries)]["type"]
            if kind in DICTS or kind == LIST:
                continue
            path = self._path(words)
            for prefix, parts in _shared(entries, world):
                leaves.append(((*prefix, *path), self._leaf((*prefix, *path), parts, names)))
        filled = {words[:-1] for words in ranks}
        for words, kind in self.containers.items():
            if words not in filled:
                leaves.append((self._path(words), [] if kind == LIST else {}))
        lists = {self._path(words) for words, kind in self.containers.items() if kind == LIST}
        return state_from_leaves(leaves, lambda path: path in lists or path[1:] in lists), names

    def _by_path(self, manifest: Mapping[Any, Any], world: int) -> dict[Path, dict[int, Mapping[str, Any]]]:
        """The entries of all ranks by path. Records the keys of containers."""
        found: dict[Path, dict[int, Mapping[str, Any]]] = {}
        for name, entry in manifest.items():
            if not isinstance(name, str) or not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
                raise CheckpointError("the manifest holds what is no entry")
            first, *rest = name.split("/")
            if not (first.isascii() and first.isdigit() and len(first) < 10 and int(first) < world) or not rest:
                raise CheckpointError(f"the manifest holds '{name:.100}', which names no rank and path")
            if len(rest) > MAX_DEPTH:
                raise CheckpointError(f"'{name:.100}' is nested more than {MAX_DEPTH} deep")
            path = tuple(rest)
            found.setdefault(path, {})[int(first)] = entry
            if entry["type"] in DICTS or entry["type"] == LIST:
                self.containers.setdefault(path, entry["type"])
                self._note_keys(path, entry)
        return found

    def _note_keys(self, path: Path, entry: Mapping[str, Any]) -> None:
        keys = entry.get("keys", [])
        if not isinstance(keys, list) or not all(type(key) in (str, int) for key in keys):
            raise CheckpointError(f"the keys of '{'/'.join(map(str, path)):.100}' should be strings and numbers")
        self.most -= len(keys)
        if self.most < 0:
            raise CheckpointError("the manifest is damaged: it speaks of more than it could")
        for key in keys:
            if type(key) is int:
                self.keys[(*path, str(key))] = key

    def _path(self, words: Path) -> Path:
        """The keys of a path in the manifest."""
        path: list[str | int] = []
        for depth, word in enumerate(words):
            here = words[: depth + 1]
            text = str(word)
            if self.containers.get(words[:depth]) == LIST and text.isascii() and text.isdigit() and len(text) < 10:
                path.append(int(text))
            else:
                path.append(self.keys.get(here, unquote(text)))
        return tuple(path)

    def _leaf(self, path: Path, entries: Sequence[Mapping[str, Any]], names: TensorNames) -> Any:
        entry, what = entries[0], f"'{'/'.join(map(str, path)):.200}'"
        kind = entry["type"]
        if kind in VALUES:
            text = entry.get("serialized_value")
            try:
                return VALUES[kind](str(text))
            except (ValueError, KeyError, struct.error) as error:
                raise CheckpointError(f"{what} should be a {kind}, and is garbled") from error
        if kind == "object":
            file = self.files.opened(_text(entry.get("location"), what))
            if entry.get("serializer") != SAVED:
                raise CheckpointError(f"{what} was serialised by {entry.get('serializer')!r:.50}, which is unknown")
            return with_stored_tensors(load_value(file, 0, file.size, what), path, names, nbytes=file.size)
        return names.add(self._tensor(names.free(path), entries, what))

    def _tensor(self, name: str, entries: Sequence[Mapping[str, Any]], what: str) -> StoredTensor:
        entry = entries[0]
        if entry["type"] == "Tensor":
            sizes = parse_counts(entry.get("shape"), f"the shape of {what}")
            dtype, at = self._locate(entry, sizes, what)
            return assemble_tensor(name, dtype, sizes, [Chunk((0,) * len(sizes), sizes, at)], self.files)
        word = "chunks" if entry["type"] == "ChunkedTensor" else SHARDED.get(entry["type"])
        if word is None:
            raise CheckpointError(f"{what} is a {entry['type']!r:.50}, which is unknown")
        chunks, dtypes = list[Chunk](), set[torch.dtype]()
        for part in entries:
            shards = part.get(word)
            if not isinstance(shards, list):
                raise CheckpointError(f"{what} has no list of {word}")
            self.most -= len(shards)
            if self.most < 0:
                raise CheckpointError("the manifest is damaged: it speaks of more than it could")
            for shard in shards:
                if not isinstance(shard, dict) or not isinstance(shard.get("tensor"), dict):
                    raise CheckpointError(f"{what} has a shard that is garbled")
                offsets = parse_counts(shard.get("offsets"), f"offsets of {what}")
                sizes = parse_counts(shard.get("sizes"), f"sizes of {what}")
                dtype, at = self._locate(shard["tensor"], sizes, what)
                dtypes.add(dtype)
                chunks.append(Chunk(offsets, sizes, at))
        if len(dtypes) != 1 or len({len(row) for chunk in chunks for row in chunk[:2]}) != 1:
            raise CheckpointError(f"the shards of {what} differ in dtype or number of dims, or there are none")
        ndim = len(chunks[0].sizes)
        size: Sequence[int] = [max(chunk.offsets[dim] + chunk.sizes[dim] for chunk in chunks) for dim in range(ndim)]
        if "shape" in entry:
            size = parse_counts(entry["shape"], f"the shape of {what}")
        return assemble_tensor(name, dtypes.pop(), size, chunks, self.files)

    def _locate(
        self, words: Mapping[str, Any], sizes: tuple[int, ...], what: str
    ) -> tuple[torch.dtype, FileLocation | torch.Tensor]:
        """The dtype and the location of a tensor that lies in one file."""
        word = words.get("dtype")
        dtype = DTYPES.get(word.removeprefix("torch.")) if isinstance(word, str) else None
        if dtype is None:
            raise CheckpointError(f"{what} is of dtype {_shown(word)}, which cannot be read")
        if parse_counts(words.get("shape"), f"the shape of {what}") != sizes:
            raise CheckpointError(f"the shape of a file of {what} is not that of its shard")
        location = _text(words.get("location"), what)
        nbytes = dtype.itemsize
        for size in sizes:
            nbytes *= size
        if not nbytes:
            return dtype, FileLocation(location, 0)
        begin, end = 0, self.files.size(location)
        if words.get("byte_range") is not None:
            span = parse_counts(words["byte_range"], f"the byte_range of {what}")
            if len(span) != 2 or not span[0] <= span[1] <= end:
                raise CheckpointError(f"the byte_range of {what} is not within '{location:.100}'")
            begin, end = span
        if words.get("serializer") == RAW:
            if end - begin != nbytes:
                raise CheckpointError(
                    f"{what} should have {nbytes:,} bytes; '{location:.100}' has {end - begin:,} of it"
                )
            return dtype, FileLocation(location, begin)
        if words.get("serializer") != SAVED:
            raise CheckpointError(f"{what} was serialised by {_shown(words.get('serializer'))}, which cannot be read")
        found = find_tensor(self.files.opened(location), begin, end - begin, what)
        if isinstance(found, torch.Tensor):
            return dtype, found
        if (found.dtype, found.sizes) != (dtype, sizes):
            raise CheckpointError(f"'{location:.100}' holds another tensor than {what}")
        return dtype, FileLocation(location, found.begin)


def _shared(
    entries: Mapping[int, Mapping[str, Any]], world: int
) -> list[tuple[tuple[str, ...], list[Mapping[str, Any]]]]:
    """The entries of one path with the prefix of their path: empty for entries of all ranks, else the rank."""
    first = entries[min(entries)]
    if first["type"] in SHARDED:
        if any(entry["type"] != first["type"] for entry in entries.values()):
            raise CheckpointError("a sharded tensor is something else on another rank")
        return [((), list(entries.values()))]
    if first.get("replicated") is True or world == 1:
        return [((), [first])]
    if first["type"] in VALUES and len(entries) == world:
        values = {(entry["type"], str(entry.get("serialized_value"))) for entry in entries.values()}
        if len(values) == 1:
            return [((), [first])]
    return [((str(rank),), [entry]) for rank, entry in sorted(entries.items())]


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise CheckpointError(f"{what} has no location")
    return value


def _shown(value: Any) -> str:
    return f"{value!r:.50}" if isinstance(value, str) else "?"


def _parsed(text: bytes, what: str) -> Mapping[str, Any]:
    try:
        words = json.loads(text)  # all releases of torchsnapshot write JSON, as YAML
    except RecursionError as error:
        raise CheckpointError(f"{what} is nested too deep") from error
    except ValueError:
        words = _yaml(text, what)
    if not isinstance(words, dict):
        raise CheckpointError(f"{what} is damaged: it is not a dict")
    return words


def _yaml(text: bytes, what: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped,unused-ignore] # its stubs are another package
    except ImportError as error:
        raise CheckpointError(f"{what} is YAML, for which PyYAML is needed: pip install pyyaml") from error
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    try:
        for event in yaml.parse(text, Loader=loader):  # unlike load, not recursive
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH or isinstance(event, yaml.AliasEvent):
                raise CheckpointError(f"{what} is nested too deep, or refers to itself")
        return yaml.load(text, Loader=loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{what} is damaged: it is not YAML ({type(error).__name__})") from error
