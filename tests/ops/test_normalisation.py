"""Norms with nothing gathered: whatever of input, weight and bias is cut, they are what the plain ones are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from tests.ops.twin import ROWS, TWO, Layouts, along, assert_same, normal, plain
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

import shardwise
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

SIZE = (3, 8, 6)  # samples, channels, space

NORMS: dict[str, tuple[int, Callable[..., Any]]] = {  # which dim the weight has
    "layer": (2, lambda x, w, b: F.layer_norm(x, (6,), w, b)),
    "rms": (2, lambda x, w, b: F.rms_norm(x, (6,), w, 1e-5) + b),
    "group": (1, lambda x, w, b: F.group_norm(x, 4, w, b)),
    "group, all channels": (1, lambda x, w, b: F.group_norm(x, 1, w, b)),
    "instance": (1, lambda x, w, b: F.instance_norm(x, None, None, w, b)),
    "batch": (1, lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True)),
    "batch, kept statistics": (
        1,
        lambda x, w, b: F.batch_norm(x, torch.zeros(8).double(), torch.ones(8).double(), w, b, training=False),
    ),
}


def try_norm(name: str, inputs: dict[str, Layouts], weights: dict[str, Layouts]) -> None:
    """One norm with each layout of the input and each of weight and bias."""
    dim, norm = NORMS[name]
    weight, bias = normal(SIZE[dim], seed=1), normal(SIZE[dim], seed=2)
    for of_x, x_layouts in inputs.items():
        for of_w, w_layouts in weights.items():
            if x_layouts is plain and w_layouts is plain:
                continue
            operands = [(normal(*SIZE), x_layouts), (weight, w_layouts), (bias, w_layouts)]
            assert_same(norm, operands, f"{name} norm, input {of_x}, weight {of_w}")


@pytest.mark.parametrize("name", NORMS)
@ranks(2)
def test_norms_on_two_ranks(name: str) -> None:
    """Plain and sharded inputs and weights, in all dims and in uneven boxes."""
    inputs = {**TWO, "plain": plain, "space": along(2, 0, 1)}
    weights = {"plain": plain, **{kind: TWO[kind] for kind in ("rows", "uneven", "replicated")}}
    try_norm(name, inputs, weights)


@pytest.mark.parametrize("name", NORMS)
@ranks(4)
def test_norms_on_four_ranks(name: str) -> None:
    """Each dim of the input in four chunks, or in three on two ranks, of which two have nothing."""
    inputs = {f"dim {dim}": along(dim, 0, 1, 2, 3) for dim in range(3)}
    try_norm(name, {**inputs, "two ranks": along(0, 3, 1, 3)}, {"rows": along(0, 3, 2, 1, 0)})


@ranks(2)
def test_no_weight_and_several_dims() -> None:
    """Without weight or bias, and over two dims, of which one is cut."""
    for kind, layouts in TWO.items():
        assert_same(lambda x: F.layer_norm(x, (8, 6)), [(normal(*SIZE), layouts)], kind)
        weight = (normal(8, 6, seed=1), layouts)
        assert_same(lambda x, w: F.layer_norm(x, (8, 6), w), [(normal(*SIZE), along(2, 0, 1)), weight], kind)


@ranks(2)
def test_rms_norm_is_one_call_where_its_dims_are_whole() -> None:
    """Torch has one kernel for it on some devices. Where a dim is cut, the norm is made of other ops."""
    weight = shardwise.shard(normal(6, seed=1), 0)
    for dim, weights, calls in ((0, normal(6, seed=1), 1), (0, None, 1), (2, normal(6, seed=1), 0), (0, weight, 0)):
        x = shard_tensor(normal(*SIZE), shardwise.ChunkShardingSpec(dim, ["rank:0/cpu", "rank:1/cpu"]))
        plain_weight = weights.full_tensor() if isinstance(weights, shardwise.ShardedTensor) else weights
        expected = F.rms_norm(normal(*SIZE), (6,), plain_weight)
        with mock.patch.object(torch, "rms_norm", wraps=torch.rms_norm) as norm:
            found = F.rms_norm(x, (6,), weights)
        torch.testing.assert_close(found.full_tensor(), expected)
        given = [
            call.kwargs["input"] for call in norm.call_args_list if "input" in call.kwargs
        ]  # of a shard, or of none
        assert sum(not one.is_meta for one in given) == calls


@ranks(2)
def test_the_input_stays() -> None:
    """An input that is cut along what is averaged stays where it is."""
    x = shardwise.rand(shardwise.ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"]), 16, 4096)
    with shardwise.gather_budget(0):
        found = F.layer_norm(x, (4096,))
    assert found.sharding_spec() == x.sharding_spec()


@ranks(2)
def test_running_statistics_are_those_of_all_samples() -> None:
    """Plain and sharded buffers, brought up to date from samples that lie apart."""
    x = normal(*SIZE)
    expected = [torch.zeros(8).double(), torch.ones(8).double()]
    F.batch_norm(x, *expected, training=True)
    for dim in range(3):
        tensor = shard_tensor(x, shardwise.ChunkShardingSpec(dim, ["rank:0/cpu", "rank:1/cpu"]))
        buffers = [torch.zeros(8).double(), torch.ones(8).double()]
        cut = [shard_tensor(one, ROWS(one.shape)) for one in buffers]
        with shardwise.gather_budget(0):
            F.batch_norm(tensor, *buffers, training=True)
            F.batch_norm(tensor, *cut, training=True)
        for one, other, wanted in zip(buffers, cut, expected, strict=True):
            torch.testing.assert_close(one, wanted)
            torch.testing.assert_close(other.full_tensor(), wanted)


@ranks(2)
def test_short_floats_are_averaged_in_longer_ones() -> None:
    """As torch does it: a cut bfloat16 row of equal large numbers has a variance of 0."""
    x = torch.full((4, 512), 300.0, dtype=torch.bfloat16)
    tensor = shard_tensor(x, shardwise.ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"]))
    found = F.layer_norm(tensor, (512,))
    assert found.dtype == torch.bfloat16
    assert bool((found.full_tensor() == 0).all())


@ranks(2)
def test_running_variances_of_small_values() -> None:
    """A variance that is far below eps, which one over the standard deviation holds nothing of."""
    x = normal(*SIZE) * 1e-6
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        statistics = torch.float64 if dtype == torch.float64 else torch.float32
        expected = [torch.zeros(8, dtype=statistics), torch.ones(8, dtype=statistics)]
        F.batch_norm(x.to(dtype), *expected, training=True, momentum=1.0)
        for dim in range(3):
            tensor = shard_tensor(x.to(dtype), shardwise.ChunkShardingSpec(dim, ["rank:0/cpu", "rank:1/cpu"]))
            buffers = [torch.zeros_like(expected[0]), torch.ones_like(expected[1])]
            F.batch_norm(tensor, *buffers, training=True, momentum=1.0)
            # Sums of 15 squares or so, in another order: 2 * 15 * eps apart, relative to their size.
            torch.testing.assert_close(buffers[1], expected[1], rtol=32 * torch.finfo(statistics).eps, atol=0)
