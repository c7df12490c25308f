"""Folders that torch.distributed.checkpoint reads, written a part at a time and without a process group."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp_library
from tests.cases import ALL, PLAIN, SIZE, holds
from tests.checkpoint.archive.locations import of_all_kinds, same, state_of
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import shardwise
from shardwise.checkpoint.archive.formats import dcp
from shardwise.checkpoint.archive.formats.dcp_writing import TensorLeaf, write_dcp
from shardwise.checkpoint.storage.local import LocalStorage
from shardwise.comm.transfer.views import view_of
from shardwise.errors import CheckpointError
from shardwise.testing import ranks


def leaf(tensor: torch.Tensor) -> TensorLeaf:
    """A plain tensor to be written."""
    return TensorLeaf(tensor.dtype, tensor.shape, lambda offsets, sizes: view_of(tensor, offsets, sizes))


def leaves(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """A nested state with tensors and values."""
    yield from ((("model", name), leaf(tensor)) for name, tensor in tensors.items())
    yield ("list", 0), leaf(PLAIN)
    yield ("list", 1, "step"), 7
    yield ("words",), {"a": (1, None)}


def test_torch_reads_what_was_written(tmp_path: Path) -> None:
    """By torch's own loader and by ours: all dtypes, 0-d, empty, strided, and large ones in several chunks."""
    tensors = of_all_kinds()
    expected = {"model": tensors, "list": [PLAIN, {"step": 7}], "words": {"a": (1, None)}}
    for most in (2**20, 40):
        place = tmp_path / str(most)
        sizes = write_dcp(LocalStorage(place), leaves(tensors), max_bytes=most)
        assert sizes == {file.name: file.stat().st_size for file in place.iterdir()}
        index = dcp.build_index(LocalStorage(place))
        assert len(index.tensors["list/0"].layout) == (1 if most > 40 else 7)
        assert same(state_of(index, LocalStorage(place)), expected)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns when there is no process group
            dcp_to_torch_save(place, tmp_path / "whole.pt")
        assert same(torch.load(tmp_path / "whole.pt"), expected)


@ranks(4)
def test_torch_loads_it_into_any_layout(tmp_path: Path) -> None:
    """What one process wrote in chunks, loaded by four ranks."""
    if torch.distributed.get_rank() == 0:
        write_dcp(LocalStorage(tmp_path), [(("w",), leaf(PLAIN)), (("step",), 3)], max_bytes=50)
    torch.distributed.barrier()
    for spec in ALL.values():
        state: dict[str, Any] = {"w": shardwise.zeros(spec, *SIZE), "step": 0}
        dcp_library.load(state, checkpoint_id=tmp_path)
        assert holds(state["w"], PLAIN)
        assert state["step"] == 3


def test_nothing_is_left_of_a_write_that_failed(tmp_path: Path) -> None:
    """An error while a tensor is read, two entries of one name, a folder that has a checkpoint."""

    def broken() -> Iterator[tuple[tuple[str | int, ...], Any]]:
        yield ("w",), leaf(PLAIN)
        raise CheckpointError("the source is damaged")

    place = tmp_path / "new"
    with pytest.raises(CheckpointError, match="the source is damaged"):
        write_dcp(LocalStorage(place), broken())
    with pytest.raises(CheckpointError, match=r"two entries would be called 'a\.b'"):
        write_dcp(LocalStorage(place), [(("a", "b"), 1), (("a.b",), 2)])
    assert not place.exists()
    write_dcp(LocalStorage(place), [(("a",), 1)])
    with pytest.raises(CheckpointError, match="already"):
        write_dcp(LocalStorage(place), [(("a",), 1)])
