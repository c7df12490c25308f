"""``index.json``: the tensors of a checkpoint, their boxes and files, and all plain values.

The index is the only file of a checkpoint that is ever replaced. It ends with a checksum of everything before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardwise.checkpoint.archive.blocks import ALGORITHM, checksum
from shardwise.checkpoint.archive.layout_json import PlacesWriter, layout_from_json, layout_to_json, places_from_json
from shardwise.checkpoint.archive.state_json import decode_tree
from shardwise.checkpoint.archive.stored import Index, StoredTensor, dtype_from_name, dtype_name
from shardwise.checkpoint.archive.tensor_file import CHECKSUMS, METADATA
from shardwise.checkpoint.storage import Storage
from shardwise.checkpoint.storage.protocol import read_file
from shardwise.errors import CheckpointError, DamageError, ShardwiseError
from shardwise.layout import parse_size
from shardwise.layout.geometry import describe

INDEX = "index.json"
SUFFIX = ".safetensors"  # of the files with tensors
FORMAT = "shardwise checkpoint"
VERSION = 2
OWN_FILE = re.compile(r"rank-\d{5,}\.[0-9a-f]{16}\.safetensors")
_ENDING = ',\n "sum": "'  # before the checksum


class FileRecord(NamedTuple):
    """A file in the index: its bytes, and the checksum of its header and checksum table."""

    name: str
    size: int
    sum: int


def file_name(rank: int, checkpoint: str) -> str:
    """The unique name of the file that a rank writes for one checkpoint."""
    return f"rank-{rank:05d}.{checkpoint}{SUFFIX}"


def box_key(name: str, size: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """The key of a box in its file: the name of the tensor, and the box unless it is the whole tensor.

    Keys are unique: a key without a box never ends like a key with a box.
    """
    plain = tuple(sizes) == tuple(size) and not name.endswith("]") and name not in (METADATA, CHECKSUMS)
    return name if plain else f"{name}{describe(offsets, sizes)}"


def write_index(checkpoint: str, files: Sequence[FileRecord], tensors: Sequence[StoredTensor], state: Any) -> bytes:
    """The content of the index file; ``state`` is encoded."""
    places = PlacesWriter()
    described = {
        tensor.name: {
            "dtype": dtype_name(tensor.dtype),
            "size": list(tensor.size),
            **layout_to_json(tensor.layout, places),
        }
        for tensor in tensors
    }
    parts = {
        "format": json.dumps(FORMAT),
        "version": json.dumps(VERSION),
        "id": json.dumps(checkpoint),
        "checksums": json.dumps(ALGORITHM),
        "files": _lines([json.dumps([file.name, file.size, f"{file.sum:016x}"]) for file in files], "[]"),
        "places": _lines([json.dumps(words) for words in places.words], "[]"),
        "tensors": _lines([f"{json.dumps(name)}: {json.dumps(words)}" for name, words in described.items()], "{}"),
        "state": json.dumps(state, allow_nan=False),
    }
    text = "{" + ",".join(f'\n "{key}": {words}' for key, words in parts.items())
    return f'{text}{_ENDING}{checksum(text.encode()):016x}"\n}}'.encode()


def _lines(entries: Sequence[str], brackets: str) -> str:
    """JSON with one line for each entry, so that people can read the file."""
    inner = ",\n  ".join(entries)
    return f"{brackets[0]}\n  {inner}\n {brackets[1]}" if entries else brackets


def index_text(storage: Storage) -> bytes:
    """The content of the index file; raises where the folder has none."""
    names = storage.names()
    if INDEX not in names:
        raise CheckpointError(_without_index(storage, names))
    return read_file(storage, INDEX)


def parse_index(text: bytes, where: object) -> Index:
    """The parsed index; raises where it is damaged, or of another format or version."""
    try:
        words = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamageError(f"'{where}' is damaged: its '{INDEX}' is not JSON ({error})") from error
    if not isinstance(words, dict) or words.get("format") != FORMAT:
        raise CheckpointError(f"'{where}' is not a checkpoint of shardwise: its '{INDEX}' is of another kind")
    if words.get("version") != VERSION:
        raise CheckpointError(
            f"'{where}' is, says its '{INDEX}', of version {words.get('version')!r:.20}, and this shardwise "
            f"reads version {VERSION}: use another one"
        )
    body, _, rest = text.rpartition(_ENDING.encode())
    if rest != f'{checksum(body):016x}"\n}}'.encode():
        raise DamageError(f"'{where}' is damaged: its '{INDEX}' is not what was written. Take another checkpoint")
    try:
        return _parsed(words)
    except (ShardwiseError, KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        said = str(error) if isinstance(error, ShardwiseError) else f"{error!r:.200} is lacking or garbled"
        raise DamageError(f"'{where}' is damaged: in its '{INDEX}', {said}") from error


def _without_index(storage: Storage, names: Sequence[str]) -> str:
    if not names:
        return f"there is no checkpoint at '{storage}': nothing is there"
    if any(OWN_FILE.fullmatch(name) for name in names):
        return f"'{storage}' is half a checkpoint: it has no '{INDEX}', so its save did not finish. Take an earlier one"
    return f"'{storage}' is not a checkpoint of shardwise: it has no '{INDEX}'; it holds {', '.join(names[:5])}"


def _parsed(words: Mapping[str, Any]) -> Index:
    if words["checksums"] != ALGORITHM:
        raise CheckpointError(f"its checksums are {words['checksums']!r:.50}, and this shardwise knows {ALGORITHM}")
    files = [_file(*entry) for entry in words["files"]]
    places = places_from_json(words["places"], len(files))
    tensors = {}
    for name, entry in words["tensors"].items():
        size = parse_size(entry["size"])
        layout = layout_from_json(name, size, entry, places)
        tensors[name] = StoredTensor(name, dtype_from_name(entry["dtype"], name), size, layout)
    if len({file.name for file in files}) < len(files):
        raise CheckpointError("a file is named twice")
    if sum(tensor.nbytes for tensor in tensors.values()) > sum(file.size for file in files):
        raise CheckpointError("its tensors have more bytes than its files")
    return Index(
        str(words["id"]),
        {file.name: file.size for file in files},
        tensors,
        decode_tree(words["state"], tensors),
        sums={file.name: file.sum for file in files},
    )


def _file(name: Any, size: Any, written: Any) -> FileRecord:
    if not isinstance(name, str) or not name.isprintable() or "/" in name or not name.endswith(SUFFIX):
        raise CheckpointError(f"{name!r:.100} is no name of a file")
    if type(size) is not int or size < 0:
        raise CheckpointError(f"'{name}' has {size!r:.50} bytes")
    return FileRecord(name, size, int(written, 16))
