"""A table, batches of ids to look up in it, and how their results are compared with those of a plain table."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec
from unittest import mock

import torch
import torch.distributed as dist
from tests.cases import SIZE, assert_close
from torch.nn import functional

import shardwise
from shardwise import ShardedTensor
from shardwise.ops.embedding import masked_sums, rows

P = ParamSpec("P")

ROWS, WIDTH = SIZE

# Of ranks 0 to 3: repeated ids, none at all, ids that others have too, all of one kind.
BATCHES = [torch.tensor(ids, dtype=torch.int64) for ids in ([6, 0, 3, 3, 2], [], [5, 5, 4, 0, 1, 6, 2, 5, 3], [2, 2])]

BAGS = [torch.tensor(bags, dtype=torch.int64) for bags in ([0, 0, 2], [0], [0, 1, 5, 9], [0])]  # some are empty


def own(function: Callable[P, None]) -> Callable[P, None]:
    """Decorator: within `own_batches`, on each rank."""

    @functools.wraps(function)
    def within(*args: P.args, **kwargs: P.kwargs) -> None:
        with shardwise.settings.own_batches():
            function(*args, **kwargs)

    return within


def table() -> torch.Tensor:
    """The plain table, the same on every rank."""
    return torch.rand(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def seeds(*size: int) -> torch.Tensor:
    """What the results are multiplied with, so that each entry's gradient is another."""
    return torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def mine(values: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """This rank's part of what all ranks have together."""
    part: torch.Tensor = values.split(sizes)[dist.get_rank()]
    return part


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that two plain tensors are the same but for rounding."""
    assert_close(actual.detach(), expected.detach())


def shards_close(tensor: ShardedTensor | None, expected: torch.Tensor) -> None:
    """Assert that every local shard, sparse or not, is its part of the plain tensor but for rounding."""
    for shard in [] if tensor is None else tensor.local_shards():
        begin, size = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        index = tuple(slice(b, b + s) for b, s in zip(begin, size, strict=True))
        close(shard.tensor.to_dense(), expected[index])


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"padding_idx": 3},
    "padding from the end": {"padding_idx": -2},
    "padding that nobody uses": {"padding_idx": 6},
    "max_norm": {"max_norm": 1.2},
    "max_norm of another norm, with padding": {"max_norm": 2.5, "norm_type": 1.0, "padding_idx": 0},
    "max_norm of the largest": {"max_norm": 0.5, "norm_type": float("inf")},
    "scale_grad_by_freq": {"scale_grad_by_freq": True, "padding_idx": 3},
}


def exchanging() -> AbstractContextManager[Any]:
    """Within this context, rows of a small batch are exchanged, too, and not added up."""
    return mock.patch.multiple(masked_sums, MOST_ON_CPU=-1, MOST_ON_ACCELERATOR=-1)


def ways(options: dict[str, Any]) -> list[AbstractContextManager[Any]]:
    """A context for each way in which rows are looked up under these options: exchanged, and added up."""
    only_exchanged = options.keys() & {"max_norm", "scale_grad_by_freq", "sparse"}
    return [exchanging(), *([] if only_exchanged else [nullcontext()])]


def sent(ids: torch.Tensor, weight: ShardedTensor) -> list[list[int]]:
    """The bytes that this rank sends to each while it exchanges rows of ids: numbers, ids, rows."""
    with exchanging(), mock.patch.object(rows, "exchange_with_all", wraps=rows.exchange_with_all) as wire:
        functional.embedding(ids, weight)
    return [[each.numel() for each in call.args[2]] for call in wire.call_args_list]
