"""Checkpoints that say what nobody wrote, with checksums that fit: as somebody may make them who means harm."""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tests.checkpoint.files import file_of, with_sum

import shardwise
from shardwise import ShardMetadata
from shardwise.checkpoint.archive.blocks import checksum
from shardwise.checkpoint.archive.index_file import INDEX
from shardwise.errors import CheckpointError
from shardwise.layout.metadata import ShardedTensorMetadata, TensorProperties
from shardwise.tensor import Shard, ShardedTensorBase

ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2,
    1.5,
    float("nan"),
    10**18,
    10**30,
    "",
    "\ud800/\x00.safetensors",
    "testing",
    "float64",
    [],
    {},
    [[], 0],
    [0, 0, 1, 10**12],
    {"files": [0, 10**12]},
    {"tensor": "a"},
)


def in_one_process(plain: torch.Tensor, *boxes: tuple[list[int], list[int]]) -> ShardedTensorBase:
    """A tensor all of whose shards are here."""
    records = [ShardMetadata(offsets, sizes, "cpu") for offsets, sizes in boxes]
    shards = []
    for record in records:
        ends = zip(record.shard_offsets, record.shard_sizes, strict=True)
        shards.append(Shard(plain[tuple(slice(o, o + s) for o, s in ends)].clone(), record))
    metadata = ShardedTensorMetadata(records, plain.shape, TensorProperties.create_from_tensor(plain))
    return ShardedTensorBase._init_from_local_shards_and_global_metadata(shards, metadata)


def plain_state() -> dict[str, Any]:
    """What is saved, and what it is loaded into."""
    ramp = torch.arange(24.0).reshape(4, 6)
    return {
        "a": ramp + 1,
        "grid": ramp + 2,
        "boxes": ramp + 3,
        "phase": torch.tensor(1 + 2j),
        "values": [1, (2.5, None), {"x": True, 5: 1j}, b"\x01", 2**70, float("inf")],
    }


def save_small(folder: Path) -> None:
    """A checkpoint with a plain tensor, one in a grid of boxes, one in boxes of any kind, and values of all kinds."""
    state = plain_state()
    state["grid"] = in_one_process(state["grid"], ([0, 0], [2, 6]), ([2, 0], [2, 6]))
    state["boxes"] = in_one_process(state["boxes"], ([0, 0], [1, 6]), ([1, 0], [3, 2]), ([1, 2], [3, 4]))
    shardwise.save(state, folder)


def mutants(words: Any) -> Iterator[tuple[str, Any]]:
    """Every node replaced by every odd value, and every entry left out; with what was done."""
    for path in list(_paths(words)):
        name = "/".join(map(str, path))
        for odd in ODD:
            changed = copy.deepcopy(words)
            _at(changed, path[:-1])[path[-1]] = odd
            yield f"{name} is {odd!r}", changed
        changed = copy.deepcopy(words)
        del _at(changed, path[:-1])[path[-1]]
        yield f"{name} is left out", changed
        changed = copy.deepcopy(words)
        parent = _at(changed, path[:-1])
        if isinstance(parent, list):
            parent.insert(path[-1], parent[path[-1]])
            yield f"{name} is there twice", changed


def _paths(words: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = words.items() if isinstance(words, dict) else enumerate(words) if isinstance(words, list) else ()
    for key, inner in items:
        yield from _paths(inner, (*path, key))


def _at(words: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        words = words[key]
    return words


def all_mutants(folder: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """What is to be written into which files: an index that says something else, or a file of tensors whose header
    does, with the index that takes it for true. All checksums fit."""
    index, file = json.loads((folder / INDEX).read_text()), file_of(folder, 0)
    content = file.read_bytes()
    for what, changed in mutants({key: value for key, value in index.items() if key != "sum"}):
        yield what, {INDEX: with_sum(changed), file.name: content}
    begin = 8 + int.from_bytes(content[:8], "little")
    words = json.loads(content[8:begin])
    table = content[begin + words["__checksums__"]["data_offsets"][0] :]
    for what, changed in mutants(words):
        text = json.dumps(changed).encode()
        head = len(text).to_bytes(8, "little") + text
        index["files"][0][1:] = [len(head) + len(content) - begin, f"{checksum(head + table):016x}"]
        yield f"in the header, {what}", {INDEX: with_sum(index), file.name: head + content[begin:]}


def require_told(folder: Path, what: str, *, refused: bool = False) -> None:
    """Whatever is wrong with a checkpoint, and whatever is done with it, it is told by a `CheckpointError`."""
    for read in (
        lambda: shardwise.load({**plain_state(), "values": None}, folder),
        lambda: shardwise.load({"a": torch.zeros(4, 6)}, folder, strict=False, verify=False),
        lambda: shardwise.verify(folder),
    ):
        try:
            read()
        except CheckpointError:
            continue
        except Exception as error:
            raise AssertionError(f"{what} gives {error!r}") from error
        assert not refused, f"{what} was taken"


def main() -> None:
    """Try all."""
    with tempfile.TemporaryDirectory() as folder:
        save_small(Path(folder))
        found, slowest = list(all_mutants(Path(folder))), 0.0
        for what, files in found:
            for name, content in files.items():
                (Path(folder) / name).write_bytes(content)
            begun = time.perf_counter()
            require_told(Path(folder), what)
            slowest = max(slowest, time.perf_counter() - begun)
    print(f"{len(found)} indexes and headers, and no other error; the slowest took {slowest:.3f} s")


if __name__ == "__main__":
    main()
