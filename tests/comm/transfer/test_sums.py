"""Sums of parts, wherever in memory the parts lie."""

from __future__ import annotations

import pytest
import torch

from shardwise.comm.transfer.sums import write_sum


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
def test_parts_of_their_own_storages_may_be_neighbours_in_memory(dtype: torch.dtype) -> None:
    """An allocator may put one part just behind another; they are two storages still, and not one to be viewed."""
    memory, size = bytearray(3 * 8 * dtype.itemsize), 8 * dtype.itemsize
    parts = [torch.frombuffer(memory, dtype=dtype, count=8, offset=k * size) for k in range(3)]
    for k, part in enumerate(parts):
        part.copy_(torch.arange(8) + k)
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 3
    assert parts[1].data_ptr() - parts[0].data_ptr() == parts[0].nbytes
    target = torch.empty(8, dtype=dtype)
    write_sum(target, parts)
    assert torch.equal(target, (3 * torch.arange(8) + 3).to(dtype))


def test_parts_of_one_storage_are_added_up() -> None:
    """One behind another, with a gap, and in another order."""
    memory = torch.arange(16.0, dtype=torch.float64)
    for parts in ([memory[:4], memory[4:8]], [memory[:4], memory[8:12]], [memory[12:], memory[:4]]):
        target = torch.empty(4, dtype=torch.float64)
        write_sum(target, parts)
        assert torch.equal(target, parts[0] + parts[1])
