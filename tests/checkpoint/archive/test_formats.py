"""Formats that others write: every element of what their own libraries wrote is found at its location."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp_library
from tests.cases import ALL, PLAIN, chunks
from tests.checkpoint.archive.locations import of_all_kinds, same, state_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardwise.checkpoint.archive.formats import dcp, safetensors_folder, torch_save
from shardwise.checkpoint.archive.opening import Format, format_of, read_foreign
from shardwise.checkpoint.archive.stored import FileLocation
from shardwise.checkpoint.storage.local import LocalStorage
from shardwise.checkpoint.storage.protocol import OpenFile
from shardwise.errors import CheckpointError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks


class Counting(LocalStorage):
    """A storage that counts the bytes that are read."""

    count = 0

    def open(self, name: str) -> Any:
        """As before, counting."""
        return _CountingFile(super().open(name), self)


class _CountingFile:
    def __init__(self, file: OpenFile, owner: Counting) -> None:
        self.file, self.owner, self.size, self.close = file, owner, file.size, file.close

    def read(self, begin: int, buffers: Any) -> None:
        """As before, counting."""
        self.owner.count += sum(buffer.nbytes for buffer in buffers)
        self.file.read(begin, buffers)


def save_alone(state: dict[str, Any], **options: Any) -> None:
    """Save without a process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of it
        dcp_library.save(state, no_dist=True, **options)


# torch.distributed.checkpoint -------------------------------------------------------------------------------------


@ranks(4)
def test_dcp_of_sharded_tensors_dtensors_and_values(tmp_path: Path) -> None:
    """All layouts, DTensors with replicas, nested states and values, saved by four ranks with several files each."""
    mesh = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2))
    placed = {
        "shard 0": distribute_tensor(PLAIN, mesh, [Shard(0)]),
        "replicate": distribute_tensor(PLAIN, mesh, [Replicate()]),
        "hybrid": distribute_tensor(PLAIN, grid, [Replicate(), Shard(1)]),
        "both": distribute_tensor(PLAIN, grid, [Shard(0), Shard(1)]),
    }
    values = {"lr": 0.1, "betas": (0.9, 0.99), "none": None, "words": ["a", "b"], "big": 2**70, "flag": True}
    state: dict[str, Any] = {
        "ours": {name: shard_tensor(PLAIN + k, spec) for k, (name, spec) in enumerate(ALL.items())},
        "dtensor": placed,
        "list": [torch.ones(2), {"deep/er": torch.zeros(1)}, 7],
        "plain": of_all_kinds(),
        "values": values,
        "object": {"set": {1, 2}, "size": torch.Size([1, 2])},
    }
    expected = {
        **state,
        "ours": {name: PLAIN + k for k, name in enumerate(ALL)},
        "dtensor": dict.fromkeys(placed, PLAIN),
        "object": {"set": {1, 2}, "size": (1, 2)},
    }
    writer = dcp_library.FileSystemWriter(tmp_path, thread_count=2)
    dcp_library.save(state, storage_writer=writer)
    if dist.get_rank() == 0:
        storage = LocalStorage(tmp_path)
        assert format_of(storage) is Format.DCP
        index = dcp.build_index(storage)
        assert same(state_of(index, storage), expected)
        assert set(index.files) <= set(storage.names())
        assert len(index.tensors["ours/grid"].layout) == 4
        first = {name: (stored.locations or ())[0] for name, stored in index.tensors.items()}
        in_memory = [name for name, location in first.items() if not isinstance(location, FileLocation)]
        assert in_memory == ["plain/empty", "plain/transposed"]


def test_dcp_reads_directories_and_not_data(tmp_path: Path) -> None:
    """Of 8 MiB, a few kilobytes; flat names where nobody noted paths; a folder of ranks' own metadata is refused."""
    large = {f"w{k}": torch.rand(2**18) for k in range(8)}
    save_alone({"model": large}, checkpoint_id=tmp_path / "one")
    storage = Counting(tmp_path / "one")
    index = dcp.build_index(storage)
    assert storage.count < 64 * 2**10
    assert same(state_of(index, storage), {"model": large})

    planner = dcp_library.DefaultSavePlanner(flatten_state_dict=False)
    save_alone(dict(large), checkpoint_id=tmp_path / "flat", planner=planner)
    storage = Counting(tmp_path / "flat")
    assert same(state_of(dcp.build_index(storage), storage), large)

    (tmp_path / "one" / ".metadata").rename(tmp_path / "one" / "__0.metadata")
    with pytest.raises(CheckpointError, match="use_collectives=False"):
        dcp.build_index(LocalStorage(tmp_path / "one"))


@ranks(2)
def test_dcp_written_as_safetensors(tmp_path: Path) -> None:
    """HuggingFaceStorageWriter: one rank's folder with an index, and pieces of tensors in the files of all ranks."""
    plain = {"w": PLAIN, "b": torch.arange(5, dtype=torch.bfloat16)}
    mesh = init_device_mesh("cpu", (2,))
    cut = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in plain.items()}
    writer = dcp_library.HuggingFaceStorageWriter(str(tmp_path / "cut"), save_distributed=True)
    dcp_library.save(cut, storage_writer=writer)
    if dist.get_rank() == 0:
        storage = LocalStorage(tmp_path / "cut")
        index = read_foreign(storage, format_of(storage))
        assert len(index.tensors["w"].layout) == 2
        assert same(state_of(index, storage), plain)

        writer = dcp_library.HuggingFaceStorageWriter(str(tmp_path / "one"), {"w": 1, "b": 2})
        save_alone(dict(plain), storage_writer=writer)
        storage = LocalStorage(tmp_path / "one")
        assert same(state_of(read_foreign(storage, format_of(storage)), storage), plain)


# torch.save -------------------------------------------------------------------------------------------------------


def test_files_of_torch_save(tmp_path: Path) -> None:
    """New and old files, nested, with tied tensors and parameters; tensors are mapped, not read."""
    tied = torch.rand(3)
    parameter = torch.nn.Parameter(PLAIN.clone())
    state = {"model": OrderedDict(of_all_kinds()), "tied": [tied, tied], "p": (parameter, 1), 3: {"x": None, "y": b"z"}}
    expected = {**state, "model": of_all_kinds(), "p": (PLAIN, 1)}
    for name, new in (("new.pt", True), ("old.pt", False)):
        kept = {
            key: tensor for key, tensor in of_all_kinds().items() if new or ("uint" not in key and "float8" not in key)
        }
        torch.save({**state, "model": OrderedDict(kept)}, tmp_path / name, _use_new_zipfile_serialization=new)
        storage = LocalStorage(tmp_path)
        assert format_of(storage, file=name) is Format.TORCH_FILE
        index = read_foreign(storage, Format.TORCH_FILE, file=name)
        assert same(state_of(index, storage), {**expected, "model": kept})
        assert index.state["tied"][0] is index.state["tied"][1]
        assert index.files == {name: (tmp_path / name).stat().st_size}
    torch.save({"big": torch.rand(2**20)}, tmp_path / "big.pt")
    counting = Counting(tmp_path)
    torch_save.build_index(counting, "big.pt")
    assert counting.count < 2**18


@ranks(1)
def test_objects_in_files_of_torch_save_are_refused(tmp_path: Path) -> None:
    """A module, sparse tensors, DTensors and sharded ones, of which there would be one rank's part; nothing is run."""
    storage = LocalStorage(tmp_path)
    placed = distribute_tensor(PLAIN, init_device_mesh("cpu", (1,)), [Shard(0)])
    for value, match in (
        (torch.nn.Linear(2, 2), "Linear"),
        ({"s": torch.eye(2).to_sparse()}, "sparse"),
        ({"d": placed}, "DTensor"),
        ({"s": shard_tensor(PLAIN, chunks(0, 0))}, "sharded_tensor|ShardedTensor"),
    ):
        torch.save(value, tmp_path / "file.pt")
        with pytest.raises(CheckpointError, match=match):
            torch_save.build_index(storage, "file.pt")


# safetensors ------------------------------------------------------------------------------------------------------


def test_safetensors_folders_and_files(tmp_path: Path) -> None:
    """One file, several with and without an index, and a path of one file; extra files do not matter."""
    from safetensors.torch import save_file

    tensors = {name: tensor.contiguous() for name, tensor in of_all_kinds().items()}
    storage = LocalStorage(tmp_path)
    save_file(tensors, tmp_path / "other.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    assert format_of(storage) is Format.SAFETENSORS
    assert same(state_of(safetensors_folder.build_index(storage), storage), tensors)
    save_file({"more": PLAIN}, tmp_path / "another.safetensors")
    assert same(state_of(safetensors_folder.build_index(storage), storage), {**tensors, "more": PLAIN})
    index = read_foreign(storage, format_of(storage, file="another.safetensors"), file="another.safetensors")
    assert same(state_of(index, storage), {"more": PLAIN})
    save_file({"more": PLAIN + 1}, tmp_path / "model.safetensors")
    assert same(state_of(safetensors_folder.build_index(storage), storage), {"more": PLAIN + 1})
    (tmp_path / "model.safetensors").rename(tmp_path / "clash.safetensors")
    with pytest.raises(CheckpointError, match="in two files"):
        safetensors_folder.build_index(storage)
    save_file({}, tmp_path / "model.safetensors")
    assert safetensors_folder.build_index(storage).tensors == {}


def test_folders_of_transformers(tmp_path: Path) -> None:
    """A tiny model in several files, as save_pretrained cuts it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    storage = LocalStorage(tmp_path)
    index = read_foreign(storage, format_of(storage))
    assert len(index.files) > 2
    assert same(state_of(index, storage), {name: tensor.detach() for name, tensor in model.state_dict().items()})


# Which one --------------------------------------------------------------------------------------------------------


def test_what_is_of_no_format(tmp_path: Path) -> None:
    """The error lists what is there; ours is known by its index."""
    storage = LocalStorage(tmp_path)
    with pytest.raises(CheckpointError, match="nothing is there"):
        format_of(storage)
    (tmp_path / "weights.bin").write_text("hello")
    (tmp_path / "runs").mkdir()
    with pytest.raises(CheckpointError, match=r"it holds weights\.bin, runs/"):
        format_of(storage)
    with pytest.raises(CheckpointError, match=r"neither a file of torch\.save nor of safetensors"):
        format_of(storage, file="weights.bin")
    (tmp_path / "index.json").write_text('{\n "format": "shardwise checkpoint",\n "version": 2}')
    assert format_of(storage) is Format.OWN
    with pytest.raises(CheckpointError, match="not a folder of a foreign format"):
        read_foreign(storage, Format.OWN)
