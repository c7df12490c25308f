"""Transfers over NCCL by its own collectives, by messages, and sums over replicas, as the plain tensor says."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.cases import assert_close, places
from tests.comm.transfer import carriers
from tests.comm.transfer.carriers import SAID

from shardwise import ChunkShardingSpec, Layout, ReplicatedShardingSpec
from shardwise.autograd import buckets as gradient_buckets
from shardwise.comm.transfer import all_reduce, execute
from shardwise.comm.transfer.all_reduce import sum_replicas
from shardwise.layout import Axis, Cut, Places
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@ranks(4, backend="nccl")
def test_every_carrier_moves_and_adds_up() -> None:
    """By NCCL's own collectives and by messages, in the whole group and in a part of it, out of order."""
    some = dist.new_group([3, 1])
    taken = carriers.check("cuda:0", dist.group.WORLD)
    assert set(taken.values()) == {"all-gather", "broadcast"}
    if dist.get_rank() in (1, 3):
        carriers.check("cuda:0", some)
    with mock.patch.object(execute, "own_collective", return_value=None):
        carriers.check("cuda:0", dist.group.WORLD, dtypes=(torch.bfloat16, torch.int16))


@ranks(4, backend="nccl")
def test_replicas_on_some_ranks_get_the_same_sum() -> None:
    """In one exchange and in two, where no all-reduce of the group would do it."""
    here, size = dist.get_rank(), (7, 6)
    layout = Layout.by_rule(
        size, [Axis(2), Axis(2, 0, Cut.in_steps(7, 2, 0, 4))], Places.of(places(0, 1, 2, 3, device="cuda:0"))
    )
    brought = torch.arange(4 * 42.0, device="cuda").view(4, *size)
    for at_once in (0, 1 << 18):
        with mock.patch.object(all_reduce, "AT_ONCE", at_once):
            (total,) = sum_replicas(
                layout, [brought[here][layout.index(here)]], dist.group.WORLD, dtype=brought.dtype, said=SAID
            )
        expected = brought[here] + brought[(here + 2) % 4]
        assert torch.equal(total, expected[layout.index(here)])


@ranks(2, backend="nccl")
def test_gradients_of_plain_and_replicated_leaves_come_in_buckets() -> None:
    """Small ones at the end, and with full buckets on the way, where a backward runs in another thread."""
    where = places(0, 1, device="cuda:0")
    plain = [torch.arange(1.0, 13, dtype=torch.float64, device="cuda").view(4, 3) / 7]
    plain += [torch.full((3,), 0.3 * k, dtype=torch.float64, device="cuda") for k in range(4)]
    for full in (1, 25 << 20):
        leaves = [one.clone().requires_grad_() for one in plain]
        rows = shard_tensor(plain[0], ChunkShardingSpec(0, where)).requires_grad_()
        shared = shard_tensor(plain[1], ReplicatedShardingSpec(where)).requires_grad_()
        ours = [rows, shared, *(one.clone().requires_grad_() for one in plain[2:])]
        with mock.patch.object(gradient_buckets, "BUCKET_BYTES", full):
            for table, scale, *biases in (leaves, ours):
                for _ in range(2):
                    x = table * scale
                    for bias in biases:
                        x = torch.tanh(x * bias + bias)
                    (x * x).sum().backward()
        for one, other in zip(ours, leaves, strict=True):
            grad = one.grad.full_tensor() if hasattr(one, "full_tensor") else one.grad
            assert_close(grad, other.grad)
