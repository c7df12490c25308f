"""Tensors of all kinds, a checkpoint of them, and reading by hand what an index speaks of, to compare."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch
from tests.cases import PLAIN

from shardwise.checkpoint.archive.stored import FileLocation, Index, StoredTensor
from shardwise.checkpoint.storage.protocol import Storage

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)


def of_all_kinds() -> dict[str, torch.Tensor]:
    """Plain tensors of every dtype, 0-d, empty, transposed, a part of a larger one."""
    tensors = {str(dtype): torch.arange(12).reshape(3, 4).to(dtype) for dtype in DTYPES}
    more = {"0-d": torch.tensor(3.5), "empty": torch.zeros(0, 3), "transposed": PLAIN.t(), "rows": PLAIN[2:4]}
    return {**tensors, **more, "columns": PLAIN[:, 1:3]}


def read_back(stored: StoredTensor, storage: Storage) -> torch.Tensor:
    """A tensor whose every element was read from the bytes at its location, and exactly once."""
    assert stored.locations is not None
    assert len(stored.locations) == len(stored.layout)
    result = torch.empty(stored.size, dtype=stored.dtype)
    filled = torch.zeros(stored.size, dtype=torch.int64)
    for row, location in enumerate(stored.locations):
        box = stored.layout.index(row)
        if isinstance(location, FileLocation):
            sizes = stored.layout.extent(row)
            file = storage.open(location.file)
            buffer = bytearray(math.prod(sizes) * stored.dtype.itemsize)
            file.read(location.begin, [memoryview(buffer)])
            file.close()
            result[box] = torch.frombuffer(buffer, dtype=stored.dtype).reshape(sizes)
        else:
            result[box] = location
        filled[box] += 1
    assert bool((filled == 1).all())
    return result


def state_of(index: Index, storage: Storage) -> Any:
    """The whole state, with plain tensors."""
    return _plain(index.state, storage)


def _plain(value: Any, storage: Storage) -> Any:
    if isinstance(value, StoredTensor):
        return read_back(value, storage)
    if isinstance(value, dict):
        return {key: _plain(inner, storage) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(inner, storage) for inner in value)
    return value


def same(found: Any, expected: Any) -> bool:
    """Whether two states are equal, types and bits of all."""
    if isinstance(expected, torch.Tensor):
        if type(found) is not torch.Tensor or (found.dtype, found.shape) != (expected.dtype, expected.shape):
            return False
        return bool(torch.equal(_bits(found), _bits(expected)))
    if type(found) is not type(expected):
        return False
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def make_dcp(path: Path) -> None:
    """A checkpoint of torch.distributed.checkpoint with tensors and values."""
    import torch.distributed.checkpoint as dcp_library  # it imports the old system, which tests replace

    state = {"model": of_all_kinds(), "values": [1, {"a": "b"}, None], "set": {1, 2}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns when there is no process group
        dcp_library.save(state, checkpoint_id=path, no_dist=True)
