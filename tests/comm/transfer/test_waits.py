"""Waiting for transfers: again after a failure, in several threads, and for those whose group is gone."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import suppress
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.cases import chunks

import shardwise
from shardwise.comm.transfer.all_reduce import AllReduce
from shardwise.comm.transfer.all_to_all import AllToAll
from shardwise.comm.transfer.rounds import Rounds
from shardwise.errors import TransferError
from shardwise.tensor import shard_tensor
from shardwise.tensor.tensor import Pending
from shardwise.testing import ranks

SMALL = 4096  # max_bytes: a transfer has many rounds
WHOLE = torch.arange(256.0 * 256, dtype=torch.float64).view(256, 256) + 1


def begun(count: int, max_bytes: int | None) -> list[Pending]:
    """As many transfers of rows to columns."""
    x = shardwise.shard(WHOLE, 0)
    return [x.redistribute(1, async_op=True, max_bytes=max_bytes) for _ in range(count)]


def columns() -> torch.Tensor:
    """What this rank of two gets."""
    return WHOLE.chunk(2, 1)[dist.get_rank()]


@ranks(2)
@pytest.mark.parametrize("max_bytes", [None, SMALL])
def test_a_transfer_that_has_failed_fails_again(max_bytes: int | None) -> None:
    """Whoever waits once more gets no memory that was never written, on any rank."""
    (pending,) = begun(1, max_bytes)
    failing = mock.patch.object(AllToAll if max_bytes is None else Rounds, "_deliver", side_effect=MemoryError("none"))
    if dist.get_rank():
        with failing, pytest.raises(MemoryError):
            pending.wait()
    for _ in range(2):
        if dist.get_rank():
            with pytest.raises(TransferError, match="failed before"):
                pending.wait()
        else:
            with suppress(MemoryError, TransferError):  # unless this rank has got all its own before
                assert torch.equal(pending.wait().local_tensor(), columns())


@ranks(2)
def test_a_transfer_whose_group_is_destroyed_never_comes() -> None:
    """It raises, and gives no memory that was never written."""
    group = dist.new_group([0, 1])
    x = shardwise.shard(WHOLE, 0, process_group=group)
    pending = x.redistribute(1, async_op=True, max_bytes=SMALL)
    dist.barrier()
    dist.destroy_process_group(group)
    with pytest.raises(TransferError, match="was destroyed"):
        pending.wait()


@ranks(2)
def test_threads_wait_for_transfers_that_other_threads_finish() -> None:
    """A thread that waits for a later transfer finishes the earlier one first, for whoever waits for that."""
    for _ in range(10):
        pending = begun(3, SMALL)
        found: dict[int, torch.Tensor] = {}

        def wait(k: int, pending: list[Pending], found: dict[int, torch.Tensor]) -> None:
            found[k] = pending[k].wait().local_tensor()

        threads = [threading.Thread(target=wait, args=(k, pending, found)) for k in (2, 1)]
        for thread in threads:
            thread.start()
        wait(0, pending, found)
        for thread in threads:
            thread.join()
        assert all(torch.equal(found[k], columns()) for k in range(3))


@ranks(2)
def test_sums_keep_no_memory_until_a_garbage_collection() -> None:
    """Gradients are large, and the collector counts objects."""
    made: list[weakref.ref[AllReduce]] = []
    begin = AllReduce.__init__

    def noted(self: AllReduce, *args: object, **kwargs: object) -> None:
        made.append(weakref.ref(self))
        begin(self, *args, **kwargs)

    gc.collect()
    gc.disable()
    try:
        with mock.patch.object(AllReduce, "__init__", noted):
            for size in (8, 1 << 18):  # in one exchange, and in two
                w = torch.ones(size, requires_grad=True)
                (shard_tensor(torch.ones(2, size), chunks(0, 0, 1)) * w).sum().backward()
        assert len(made) == 2
        assert [each() for each in made] == [None, None]
    finally:
        gc.enable()
