"""Files of other formats that are damaged or malicious: a `CheckpointError`, at once, and no code is run."""

from __future__ import annotations

import io
import json
import pickle
import random
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.cases import PLAIN
from tests.checkpoint.archive.locations import make_dcp, of_all_kinds, read_back
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldTensorProperties
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise.checkpoint.archive.formats import dcp, safetensors_folder, torch_save, torchsnapshot
from shardwise.checkpoint.archive.formats.zip_directory import ZipDirectory
from shardwise.checkpoint.archive.stored import Index
from shardwise.checkpoint.storage.local import LocalStorage
from shardwise.errors import CheckpointError

FLIPS = 300


def make_torch(path: Path) -> None:
    """A file of torch.save."""
    path.mkdir()
    torch.save({"model": of_all_kinds(), "values": [1, {"a": "b"}]}, path / "file.pt")


def make_safetensors(path: Path) -> None:
    """A folder with an index."""
    path.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in of_all_kinds().items()}
    save_file(tensors, path / "a.safetensors")
    save_file({"w": PLAIN}, path / "b.safetensors")
    weight_map = {**dict.fromkeys(tensors, "a.safetensors"), "w": "b.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def snapshot_entry(**changes: Any) -> dict[str, Any]:
    """An entry of a tensor of 42 numbers in the file 'data'."""
    entry = {"type": "Tensor", "location": "data", "serializer": "buffer_protocol", "dtype": "torch.float32"}
    return {**entry, "shape": [7, 6], "replicated": False, "byte_range": None, **changes}


def sharded_entry(*boxes: tuple[list[int], list[int], int]) -> dict[str, Any]:
    """An entry of shards by offsets, sizes and where their bytes begin."""
    shards = []
    for offsets, sizes, begin in boxes:
        span = [begin, begin + 4 * sizes[0] * sizes[1]]
        shards.append({"offsets": offsets, "sizes": sizes, "tensor": snapshot_entry(shape=sizes, byte_range=span)})
    return {"type": "ShardedTensor", "shards": shards}


def make_snapshot(path: Path, **entries: Any) -> None:
    """A snapshot of one rank."""
    path.mkdir(exist_ok=True)
    (path / "data").write_bytes(PLAIN.numpy().tobytes())
    torch.save((1, 2), path / "object")
    saved = {"type": "object", "location": "object", "serializer": "torch_save", "obj_type": "tuple"}
    entries = entries or {
        "w": snapshot_entry(),
        "s": sharded_entry(([0, 0], [3, 6], 0), ([3, 0], [4, 6], 72)),
        "n": {"type": "int", "serialized_value": "3", "replicated": False, "readable": None},
        "o": {**saved, "replicated": False},
    }
    manifest: dict[str, Any] = {"0/app": {"type": "dict", "keys": list(entries)}}
    manifest.update({f"0/app/{name}": entry for name, entry in entries.items()})
    (path / ".snapshot_metadata").write_text(json.dumps({"version": "0", "world_size": 1, "manifest": manifest}))


def read_torch(storage: LocalStorage) -> Index:
    """What the one file holds."""
    return torch_save.build_index(storage, "file.pt")


Maker = Callable[[Path], None]
Reader = Callable[[LocalStorage], Index]
FUZZED: dict[str, tuple[Maker, Reader, str]] = {
    "dcp metadata": (make_dcp, dcp.build_index, ".metadata"),
    "dcp data": (make_dcp, dcp.build_index, "__0_0.distcp"),
    "torch": (make_torch, read_torch, "file.pt"),
    "safetensors index": (make_safetensors, safetensors_folder.build_index, "model.safetensors.index.json"),
    "safetensors": (make_safetensors, safetensors_folder.build_index, "a.safetensors"),
    "snapshot": (make_snapshot, torchsnapshot.build_index, ".snapshot_metadata"),
}


@pytest.mark.parametrize("name", FUZZED)
@pytest.mark.filterwarnings("ignore")  # torch warns of some damaged files
def test_damage_is_an_error_or_harmless(name: str, tmp_path: Path) -> None:
    """Random flips and truncations: what is read can be read whole, or there is a CheckpointError and nothing else."""
    make, read, file = FUZZED[name]
    make(tmp_path / "place")
    storage = LocalStorage(tmp_path / "place")
    path = tmp_path / "place" / file
    original = path.read_bytes()
    generator = random.Random(17)
    refused = 0
    for turn in range(FLIPS):
        damaged = bytearray(original)
        for _ in range(generator.choice((1, 1, 3))):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        if turn % 5 == 0:
            del damaged[generator.randrange(len(damaged)) :]
        path.write_bytes(damaged)
        try:
            index = read(storage)
        except CheckpointError:
            refused += 1
            continue
        for stored in index.tensors.values():
            assert read_back(stored, storage).shape == stored.size
    assert refused > FLIPS // 10


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    """A chunk of a tensor."""
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def test_dcp_metadata_that_cannot_be(tmp_path: Path) -> None:
    """Gaps, overlaps, boxes outside, other sizes and dtypes than the file's, ranges beyond it, files elsewhere."""
    buffer = io.BytesIO()
    torch.save(PLAIN[:3].clone(), buffer)
    (tmp_path / "__0_0.distcp").write_bytes(buffer.getvalue())
    storage, length = LocalStorage(tmp_path), len(buffer.getvalue())
    properties = TensorProperties(torch.float32)

    def attempt(match: str, size: Any, chunks: Any, info: Any = None, dtype: Any = torch.float32) -> None:
        words = TensorStorageMetadata(TensorProperties(dtype), torch.Size(size), chunks)
        places = {MetadataIndex("w", part.offsets): info or _StorageInfo("__0_0.distcp", 0, length) for part in chunks}
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"w": words}, None, places)))
        with pytest.raises(CheckpointError, match=match):
            dcp.build_index(storage)

    good = [chunk((0, 0), (3, 6))]
    attempt("do not cover", (7, 6), good)
    attempt("overlap", (4, 6), [*good, chunk((1, 0), (3, 6))])
    attempt("exceeds", (2, 6), good)
    attempt("should be", (3, 5), [chunk((0, 0), (3, 5))])
    attempt("should be torch.int32", (3, 6), good, dtype=torch.int32)
    attempt("torch.qint8", (3, 6), good, dtype=torch.qint8)
    attempt("beyond all memory", (2**31, 2**31), good)
    attempt("Rank of tensor|rows of", (18,), good)
    attempt("is damaged|should be bytes", (3, 6), good, _StorageInfo("__0_0.distcp", 0, length + 1))
    attempt("is damaged|weights_only", (3, 6), good, _StorageInfo("__0_0.distcp", 8, length - 8))
    attempt("within the folder", (3, 6), good, _StorageInfo("../__0_0.distcp", 0, length))
    attempt("within the folder", (3, 6), good, _StorageInfo("/etc/passwd", 0, length))
    attempt("could not open", (3, 6), good, _StorageInfo("__1_0.distcp", 0, length))
    attempt("numbers from 0", (3, 6), good, _StorageInfo("__0_0.distcp", -1, length))
    attempt("zstd", (3, 6), good, _StorageInfo("__0_0.distcp", 0, length, ["stream.zstd"]))
    index = pickle.dumps(Metadata({"w": TensorStorageMetadata(properties, torch.Size([3, 6]), good)}, None, {}))
    (tmp_path / ".metadata").write_bytes(index)
    with pytest.raises(CheckpointError, match="does not say where 'w'"):
        dcp.build_index(storage)


def test_dcp_metadata_of_older_torch(tmp_path: Path) -> None:
    """The records of tensors were elsewhere, a plain tensor had no offsets, and nobody noted paths."""
    buffer = io.BytesIO()
    torch.save(PLAIN, buffer, _use_new_zipfile_serialization=False)
    (tmp_path / "__0_0.distcp").write_bytes(buffer.getvalue())
    words = TensorStorageMetadata(OldTensorProperties(torch.float32), PLAIN.shape, [chunk((0, 0), (7, 6))])
    info = _StorageInfo("__0_0.distcp", 0, len(buffer.getvalue()))
    metadata = pickle.dumps(Metadata({"a.w": words}, None, {MetadataIndex("a.w"): info}))
    (tmp_path / ".metadata").write_bytes(metadata)
    index = dcp.build_index(LocalStorage(tmp_path))
    assert list(index.state) == ["a.w"]
    assert torch.equal(read_back(index.state["a.w"], LocalStorage(tmp_path)), PLAIN)


def test_zip_archives_with_64_bit_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of tensors of more than 4 GiB: sizes, positions and the end of the directory are elsewhere."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
    monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    with zipfile.ZipFile(tmp_path / "file", "w") as archive:
        for number in range(5):
            archive.writestr(f"a/{number}", bytes([number]) * (1000 * number))
    content = b"before" + (tmp_path / "file").read_bytes() + b"behind"
    assert b"PK\6\6" in content
    (tmp_path / "file").write_bytes(content)
    file = LocalStorage(tmp_path).open("file")
    directory = ZipDirectory.at(file, 6, len(content) - 12, "it")
    assert directory is not None
    for number in range(5):
        assert directory.content(f"a/{number}") == bytes([number]) * (1000 * number)
    file.close()


def test_safetensors_that_cannot_be(tmp_path: Path) -> None:
    """Files elsewhere or missing, names in the wrong file, sizes that do not fit, unknown dtypes, deep nesting."""
    save_file({"w": PLAIN}, tmp_path / "a.safetensors")
    storage = LocalStorage(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    for weight_map, match in (
        ({"w": "../a.safetensors"}, "within the folder"),
        ({"w": "/etc/passwd"}, "within the folder"),
        ({"w": "b/a.safetensors"}, "no file of the folder"),
        ({"w": "b.safetensors"}, "could not open"),
        ({"w": 3}, "no name of a file"),
        ({"v": "a.safetensors"}, "says that 'v' is in"),
        ([], "no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=match):
            safetensors_folder.build_index(storage)
    index.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="not JSON"):
        safetensors_folder.build_index(storage)
    index.unlink()
    for words, match in (
        ({"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}, "should have"),
        ({"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}, "numbers from 0"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, -8]}, "numbers from 0"),
        ({"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}, "numbers from 0"),
        (
            {"dtype": "F32", "shape": [2], "data_offsets": [2**60, 2**60 + 8]},
            "header speaks of",
        ),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0]}, "should have"),
        ({"dtype": "F32", "shape": [1] * 65, "data_offsets": [0, 4]}, "at most 64"),
        ({"dtype": "distributed", "shape": [2], "data_offsets": [0, 8]}, "unknown"),
        ({"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}, "unknown"),
        ("w", "garbled"),
    ):
        text = json.dumps({"w": words}).encode()
        (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
        with pytest.raises(CheckpointError, match=match):
            safetensors_folder.build_index(storage)


def test_snapshots_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gaps, overlaps, ranges beyond the file, files elsewhere, unknown dtypes and serialisers, YAML that is nested."""
    storage = LocalStorage(tmp_path)
    whole = ([0, 0], [7, 6], 0)
    for entry, match in (
        (snapshot_entry(shape=[8, 6]), "should have"),
        (snapshot_entry(byte_range=[0, 2**40]), "not within"),
        (snapshot_entry(byte_range=[8, 0]), "not within"),
        (snapshot_entry(location="../data"), "within the folder"),
        (snapshot_entry(location="gone"), "could not open"),
        (snapshot_entry(location=None), "no location"),
        (snapshot_entry(dtype="torch.qint8"), "cannot be read"),
        (snapshot_entry(dtype="torch.distributed"), "cannot be read"),
        (snapshot_entry(serializer="per_tensor_qtensor"), "cannot be read"),
        (snapshot_entry(serializer="torch_save"), "weights_only"),
        (sharded_entry(([1, 0], [6, 6], 0)), "do not cover"),
        (sharded_entry(whole, ([1, 0], [3, 6], 0)), "overlap"),
        ({"type": "ShardedTensor", "shards": []}, "there are none"),
        ({"type": "Strange"}, "unknown"),
        ({"type": "int", "serialized_value": "x"}, "garbled"),
        ({"type": "object", "location": "data", "serializer": "torch_save"}, "weights_only"),
        ({"type": 3}, "no entry"),
    ):
        make_snapshot(tmp_path, w=entry)
        with pytest.raises(CheckpointError, match=match):
            torchsnapshot.build_index(storage)
    for text in ("- " * 100_000 + "a", "{a: " * 100_000, "[" * 100_000, "a: &a [*a]", "a: !!python/name:os.system"):
        (tmp_path / ".snapshot_metadata").write_text(text)
        with pytest.raises(CheckpointError):
            torchsnapshot.build_index(storage)
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / ".snapshot_metadata").write_text("manifest: {}")
    with pytest.raises(CheckpointError, match="pip install pyyaml"):
        torchsnapshot.build_index(storage)
    deep = {"0/" + "/".join(["a"] * 200): {"type": "int", "serialized_value": "1"}}
    (tmp_path / ".snapshot_metadata").write_text(json.dumps({"world_size": 1, "manifest": deep}))
    with pytest.raises(CheckpointError, match="deep"):
        torchsnapshot.build_index(storage)


def test_files_of_torch_save_that_claim_more_than_they_hold(tmp_path: Path) -> None:
    """Deep nesting, a list that holds itself, and a tensor that is larger than its storage."""
    storage = LocalStorage(tmp_path)
    deep: list[Any] = []
    for _ in range(300):
        deep = [deep]
    looped: list[Any] = []
    looped.append(looped)
    for value in (deep, looped):
        torch.save(value, tmp_path / "file.pt")
        with pytest.raises(CheckpointError, match="contains itself, or is nested"):
            torch_save.build_index(storage, "file.pt")
    torch.save(torch.zeros(4), tmp_path / "file.pt")
    grown = (tmp_path / "file.pt").read_bytes().replace(b"K\x04\x85", b"K\xf0\x85")
    for changed in (grown, grown.replace(b"K\x04tq", b"K\xf0tq")):
        (tmp_path / "file.pt").write_bytes(changed)
        with pytest.raises(CheckpointError):
            torch_save.build_index(storage, "file.pt")
