"""The index of a checkpoint: which tensors there are, in which boxes, in which files; and all plain values.

It is the one file of a checkpoint that is ever replaced. It ends with a checksum of all that is before it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardwise.archive.blocks import ALGORITHM, checksum
from shardwise.archive.dtypes import dtype_named, name_of_dtype
from shardwise.archive.layout_words import PlacesWriter, layout_words, read_layout, read_places
from shardwise.archive.stored import Index, StoredTensor
from shardwise.archive.tensor_file import METADATA, SUMS
from shardwise.archive.values import decode
from shardwise.archive.whole_bytes import content
from shardwise.errors import CheckpointError, DamageError, ShardwiseError
from shardwise.geometry import describe
from shardwise.layout import parse_size
from shardwise.storage import Storage

INDEX = "index.json"
SUFFIX = ".safetensors"  # of the files with tensors
FORMAT = "shardwise checkpoint"
VERSION = 2
OWN_FILE = re.compile(r"rank-\d{5,}\.[0-9a-f]{16}\.safetensors")
_ENDING = ',\n "sum": "'  # what stands before the checksum


class FileWords(NamedTuple):
    """What the index says of a file: its bytes, and the checksum of its header and table."""

    name: str
    size: int
    sum: int


def file_name(rank: int, checkpoint: str) -> str:
    """The file that a rank writes for one checkpoint; no other has this name."""
    return f"rank-{rank:05d}.{checkpoint}{SUFFIX}"


def key_of(name: str, size: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """The key of a box in its file: the name of the tensor, and of which box of it where it is not the whole.

    No two keys are the same, for one without a box never ends as one with a box does.
    """
    plain = tuple(sizes) == tuple(size) and not name.endswith("]") and name not in (METADATA, SUMS)
    return name if plain else f"{name}{describe(offsets, sizes)}"


def write_index(checkpoint: str, files: Sequence[FileWords], tensors: Sequence[StoredTensor], state: Any) -> bytes:
    """The index file of a checkpoint; the state comes encoded."""
    places = PlacesWriter()
    described = {
        tensor.name: {
            "dtype": name_of_dtype(tensor.dtype),
            "size": list(tensor.size),
            **layout_words(tensor.layout, places),
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
    """A line for each entry, for those who look at it."""
    inner = ",\n  ".join(entries)
    return f"{brackets[0]}\n  {inner}\n {brackets[1]}" if entries else brackets


def index_text(storage: Storage) -> bytes:
    """The index file, or the error that says what is there instead."""
    names = storage.names()
    if INDEX not in names:
        raise CheckpointError(_without_index(storage, names))
    return content(storage, INDEX)


def parse_index(text: bytes, where: object) -> Index:
    """What an index says, or the error that says why it cannot be believed."""
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
    places = read_places(words["places"], len(files))
    tensors = {}
    for name, entry in words["tensors"].items():
        size = parse_size(entry["size"])
        layout = read_layout(name, size, entry, places)
        tensors[name] = StoredTensor(name, dtype_named(entry["dtype"], name), size, layout)
    if len({file.name for file in files}) < len(files):
        raise CheckpointError("a file is named twice")
    if sum(tensor.nbytes for tensor in tensors.values()) > sum(file.size for file in files):
        raise CheckpointError("its tensors have more bytes than its files")
    return Index(
        str(words["id"]),
        {file.name: file.size for file in files},
        tensors,
        decode(words["state"], tensors),
        sums={file.name: file.sum for file in files},
    )


def _file(name: Any, size: Any, written: Any) -> FileWords:
    if not isinstance(name, str) or not name.isprintable() or "/" in name or not name.endswith(SUFFIX):
        raise CheckpointError(f"{name!r:.100} is no name of a file")
    if type(size) is not int or size < 0:
        raise CheckpointError(f"'{name}' has {size!r:.50} bytes")
    return FileWords(name, size, int(written, 16))
