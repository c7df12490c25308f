"""The index of a checkpoint: which tensors there are, in which pieces, in which files; and all plain values."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from shardwise.checkpoint.storage import INDEX, SUFFIX, Storage, storage_at
from shardwise.checkpoint.tensor_file import Entry
from shardwise.checkpoint.values import decode
from shardwise.errors import CheckpointError, LayoutError
from shardwise.geometry import Boxes, describe
from shardwise.layout import Layout, parse_size
from shardwise.placement import Placement

FORMAT = "shardwise checkpoint"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and the file and the key in it under which it is written."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a checkpoint. Its pieces make it up, each element once; of an empty tensor there are none."""

    name: str
    dtype: torch.dtype
    size: torch.Size
    pieces: tuple[Piece, ...]

    def entry(self, piece: Piece) -> Entry:
        """What a file says of one of its pieces."""
        return Entry(self.dtype, piece.sizes)

    @cached_property
    def files(self) -> tuple[str, ...]:
        """The files that hold any of it, each once."""
        return tuple(dict.fromkeys(piece.file for piece in self.pieces))

    @cached_property
    def layout(self) -> Layout:
        """Its pieces as boxes on ranks; the ranks are the numbers of its files, from which a transfer can begin."""
        if len(self.pieces) == 1 and self.pieces[0].sizes == tuple(self.size):  # most often
            return in_one(self.size, 0)
        numbers = {file: Placement(torch.device("cpu"), number) for number, file in enumerate(self.files)}
        offsets, sizes = [piece.offsets for piece in self.pieces], [piece.sizes for piece in self.pieces]
        places = [numbers[piece.file] for piece in self.pieces]
        try:
            boxes = Boxes.parse(offsets, sizes, len(self.size))
            if not self.size.numel():
                return Layout.of(self.size, boxes, places)
            return Layout.checked(self.size, boxes, places, lambda row: f"{row} {boxes.describe(row)}")
        except LayoutError as error:
            raise CheckpointError(f"the index says of tensor '{self.name}' what cannot be: {error}") from error


@lru_cache(maxsize=1024)  # models have many tensors of few sizes
def in_one(size: torch.Size, rank: int) -> Layout:
    """The layout of a tensor that is whole on one rank, or in one file."""
    return Layout.whole(size, [Placement(torch.device("cpu"), rank)])


@dataclass(frozen=True, eq=False)
class Index:
    """All that a checkpoint says of itself.

    ``state`` is the state that was saved, with a `StoredTensor` for each tensor. Tensors that were tied, under two
    names but the same, are one.
    """

    id: str
    files: Mapping[str, int]  # bytes of each
    tensors: Mapping[str, StoredTensor]
    state: Any


def write_index(checkpoint: str, files: Mapping[str, int], tensors: Sequence[StoredTensor], state: Any) -> bytes:
    """The index file of a checkpoint; the state comes encoded."""
    described = {
        tensor.name: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "size": list(tensor.size),
            "pieces": [
                {"offsets": piece.offsets, "sizes": piece.sizes, "file": piece.file, "key": piece.key}
                for piece in tensor.pieces
            ],
        }
        for tensor in tensors
    }
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(words)}" for name, words in described.items())
    parts = {
        "format": json.dumps(FORMAT),
        "version": json.dumps(VERSION),
        "id": json.dumps(checkpoint),
        "files": json.dumps(files),
        "tensors": f"{{\n{lines}\n }}",  # a line each, for those who look at it
        "state": json.dumps(state, allow_nan=False),
    }
    return ("{" + ",".join(f'\n "{key}": {text}' for key, text in parts.items()) + "\n}").encode()


def read_index(path: str | os.PathLike[str] | Storage) -> Index:
    """What a checkpoint holds, without loading any of it. No communication.

    >>> import tempfile, torch, shardwise
    >>> path = tempfile.mkdtemp()
    >>> shardwise.save({"bias": torch.zeros(3), "step": 7}, path)
    >>> index = shardwise.checkpoint.read_index(path)
    >>> index.tensors["bias"].size, index.state["step"], list(index.files)
    (torch.Size([3]), 7, ['rank-00000.safetensors'])
    """
    storage = storage_at(path)
    names = storage.names()
    if INDEX not in names:
        raise CheckpointError(_without_index(storage, names))
    text = storage.read(INDEX)
    try:
        words = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"'{storage}' is damaged: its '{INDEX}' is not JSON ({error})") from error
    if not isinstance(words, dict) or words.get("format") != FORMAT:
        raise CheckpointError(f"'{storage}' is not a checkpoint of shardwise: its '{INDEX}' is of another kind")
    if words.get("version") != VERSION:
        raise CheckpointError(
            f"'{storage}' is a checkpoint of version {words.get('version')!r:.20}, and this shardwise reads version "
            f"{VERSION}: use a newer one"
        )
    try:
        return _parsed(words)
    except CheckpointError as error:
        raise CheckpointError(f"'{storage}' is damaged: in its '{INDEX}', {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"'{storage}' is damaged: its '{INDEX}' lacks or garbles {error!r}") from error


def _without_index(storage: Storage, names: Sequence[str]) -> str:
    if not names:
        return f"there is no checkpoint at '{storage}': nothing is there"
    if any(name.endswith(SUFFIX) for name in names):
        return f"'{storage}' is half a checkpoint: it has no '{INDEX}', so its save did not finish. Take an earlier one"
    return f"'{storage}' is not a checkpoint of shardwise: it has no '{INDEX}'; it holds {', '.join(names[:5])}"


def _parsed(words: Mapping[str, Any]) -> Index:
    files = {str(name): _count(size) for name, size in words["files"].items()}
    for name in files:
        if "/" in name or not name.endswith(SUFFIX):
            raise CheckpointError(f"'{name:.100}' is no name of a file")
    tensors = {name: _parsed_tensor(name, entry, files) for name, entry in words["tensors"].items()}
    return Index(str(words["id"]), files, tensors, decode(words["state"], tensors))


def _parsed_tensor(name: str, words: Mapping[str, Any], files: Mapping[str, int]) -> StoredTensor:
    dtype = getattr(torch, words["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"tensor '{name}' is of dtype {words['dtype']!r:.50}, which torch {torch.__version__} lacks"
        )
    pieces = []
    for piece in words["pieces"]:
        offsets, sizes = (tuple(map(_count, piece[side])) for side in ("offsets", "sizes"))
        if piece["file"] not in files:
            raise CheckpointError(f"{describe(offsets, sizes)} of tensor '{name}' is in a file that is not listed")
        pieces.append(Piece(offsets, sizes, piece["file"], str(piece["key"])))
    return StoredTensor(name, dtype, parse_size(words["size"]), tuple(pieces))


def _count(number: Any) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r:.50} for a count")
    return number
