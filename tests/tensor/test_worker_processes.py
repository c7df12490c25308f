"""Processes that a rank starts, such as the workers of a DataLoader, are no ranks: a sharded tensor raises there."""

from __future__ import annotations

import gc
import multiprocessing
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import PLAIN, chunks
from torch.utils.data import DataLoader, Dataset

from shardwise import ShardedTensor, zeros
from shardwise.errors import ProcessGroupError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

USES: dict[str, Callable[[Any], Any]] = {
    "a row": lambda tensor: tensor[0],
    "an op that sends nothing": lambda tensor: tensor * 2,
    "an op that sends": lambda tensor: tensor.sum(0),
    "a value": lambda tensor: tensor.sum().item(),
    "full_tensor": lambda tensor: tensor.full_tensor(),
    "redistribute": lambda tensor: tensor.redistribute(1),
    "a factory": lambda tensor: zeros(0, 4),
}


class Rows(Dataset[Any]):
    """Samples that are made of a sharded tensor, where the loader makes them."""

    def __init__(self, tensor: Any, use: str) -> None:
        self.tensor, self.use = tensor, use

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> Any:
        return USES[self.use](self.tensor)


def load(data: Any, start: str) -> list[Any]:
    """All samples, by one worker; ranks of tests are daemons, which may have no children."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        patch.setitem(multiprocessing.current_process()._config, "daemon", False)
        return list(DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context=start))


@ranks(2)
def test_a_forked_worker_raises() -> None:
    """Whatever is done with the tensor, sent or not; the ranks go on together."""
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1))
    for use, function in USES.items():
        function(tensor)  # so that the worker inherits what the rank has cached
        with pytest.raises(ProcessGroupError, match=r"forked from a rank .* full_tensor\(\), or local_tensor\(\)"):
            load(Rows(tensor, use), "fork")
    assert torch.equal(tensor.full_tensor(), PLAIN)


class Collected(Dataset[int]):
    """Samples that are made after all garbage is collected."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int) -> int:
        gc.collect()
        return number


@ranks(2)
def test_a_worker_frees_no_group_of_the_rank() -> None:
    """To free a group is to wait for its threads: the worker has none of them, and would crash or hang."""
    gc.collect()
    gc.disable()
    group = dist.new_group([0, 1])
    dist.barrier(group)
    held: list[Any] = [group]
    held.append(held)  # garbage, once it is let go: only a collection frees it
    dist.destroy_process_group(group)
    del group, held
    assert load(Collected(), "fork") == [0]
    assert not gc.isenabled()
    gc.enable()
    gc.collect()


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
@ranks(2)
def test_a_tensor_is_not_given_to_a_new_process(start: str) -> None:
    """The rank that starts the process raises at once: the process would have no group to put the tensor in."""
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1))
    with pytest.raises(ProcessGroupError, match=r"cannot be given ShardedTensor.*full_tensor\(\), or local_tensor\(\)"):
        load([tensor, tensor], start)
    assert torch.equal(tensor.full_tensor(), PLAIN)


@ranks(2)
def test_a_worker_has_plain_parts() -> None:
    """What the error advises: a worker computes with this rank's part, and with the whole, made before."""
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1))
    for plain in (tensor.local_tensor(), tensor.full_tensor()):
        assert [one.tolist() for one in load(Rows(plain, "a row"), "fork")] == [plain[0].tolist()] * 2


@ranks(1)
def test_a_group_of_one_rank_works_in_its_workers() -> None:
    """Nobody is talked to."""
    tensor = shard_tensor(PLAIN, chunks(0, 0))
    assert isinstance(tensor, ShardedTensor)
    assert load(Rows(tensor, "a value"), "fork") == [PLAIN.sum().item()] * 2
