"""Random tensors that are the same however they are sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import SIZE, SPECS, chunks, holds

import shardwise
from shardwise import layout_independent, random
from shardwise.random import TileGenerator, tile_shape
from shardwise.testing import ranks, run_on_ranks


def drawn(spec: Any, tile: int) -> list[Any]:
    """Tensors, drawn in several ways, with tiles small enough to be cut by the shards."""
    random.TILE, size = tile, SIZE
    with layout_independent(seed=7):
        first, second = shardwise.rand(spec, *size), shardwise.randn(spec, *size, dtype=torch.float64)
        third = torch.nn.init.kaiming_uniform_(shardwise.empty(spec, *size))
        fourth, fifth = torch.rand_like(first), torch.nn.init.xavier_normal_(shardwise.empty(spec, *size))
        sixth = shardwise.zeros(spec, *size).bernoulli_(0.5)
    given = shardwise.rand(spec, *size, generator=TileGenerator(7))
    random.TILE = 1 << 16
    return [first, second, third, fourth, fifth, sixth, given]


def drawn_alone(tile: int) -> list[torch.Tensor]:
    """By one rank."""
    return [tensor.local_tensor() for tensor in drawn(chunks(0, 0), tile)]


def compare(tile: int, expected: list[torch.Tensor]) -> None:
    """What each rank of several holds, with what one rank drew alone."""
    world = dist.get_world_size()
    for name, spec in SPECS.items() if world == 4 else [("chunks", chunks(0, *range(world)))]:
        assert all(holds(tensor, one) for tensor, one in zip(drawn(spec, tile), expected, strict=True)), name


@pytest.mark.parametrize("tile", [4, 16, 1 << 16])
def test_the_same_values_for_every_spec_and_every_number_of_ranks(tile: int) -> None:
    """Factories, *_like, torch.nn.init and in-place filling."""
    (expected,) = run_on_ranks(1, drawn_alone, tile)
    for world in (2, 3, 4):
        run_on_ranks(world, compare, tile, expected)
    assert torch.equal(expected[0], expected[-1])
    assert not torch.equal(expected[0], expected[3])


@ranks(4)
def test_values_look_random_and_differ_between_seeds_and_tensors() -> None:
    """Also across the borders of tiles."""
    spec = chunks(1, 0, 1, 2, 3)
    with layout_independent(seed=1):
        first, second = shardwise.randn(spec, 1000, 300).full_tensor(), shardwise.randn(spec, 1000, 300).full_tensor()
    with layout_independent(seed=2):
        other = shardwise.randn(spec, 1000, 300).full_tensor()
    for tensor in (first, second, other):
        assert abs(tensor.mean().item()) < 0.01
        assert abs(tensor.std().item() - 1) < 0.01
    assert len({tensor[0, 0].item() for tensor in (first, second, other)}) == 3
    assert first.unique().numel() > 0.9 * first.numel()


@ranks(4)
def test_by_default_each_rank_draws_from_its_own_generator() -> None:
    """As the plain function on a tensor of the shard's size."""
    for function in (torch.nn.init.uniform_, torch.nn.init.normal_, torch.nn.init.kaiming_uniform_):
        tensor = shardwise.empty(chunks(0, 0, 1, 2, 3), 8, 6)
        torch.manual_seed(dist.get_rank())
        function(tensor)
        torch.manual_seed(dist.get_rank())
        assert torch.equal(tensor.local_tensor(), function(torch.empty(2, 6)))
    assert torch.equal(
        torch.nn.init.constant_(shardwise.empty(chunks(0, 0), 3), 4.0).full_tensor(), torch.full((3,), 4.0)
    )
    assert torch.equal(torch.nn.init.ones_(shardwise.empty(chunks(0, 0), 3)).full_tensor(), torch.ones(3))


@ranks(2)
def test_streams_stay_together_when_a_rank_fails() -> None:
    """A failed factory draws nothing, on any rank; a new seed begins anew."""
    with layout_independent(seed=5) as generator:
        with pytest.raises(ValueError, match="Expecting ShardingSpec"):
            shardwise.rand("rows" if dist.get_rank() else chunks(0, 0, 1), 4)
        assert generator.drawn == 0
        first = shardwise.rand(chunks(0, 0, 1), 4).full_tensor()
        generator.manual_seed(5)
        assert torch.equal(shardwise.rand(chunks(0, 1, 0), 4).full_tensor(), first)


def test_small_trailing_dims_do_not_make_small_tiles() -> None:
    """A convolution's weight is drawn in large tiles."""
    assert torch.Size(tile_shape((512, 64, 3, 3))).numel() > 30_000


@ranks(2)
def test_ranks_with_different_seeds_are_found_out() -> None:
    """When a tensor is made."""
    with layout_independent(seed=dist.get_rank()), pytest.raises(ValueError, match="seed property does not match"):
        shardwise.rand(chunks(0, 0, 1), 4)


@pytest.mark.parametrize("size", [(), (5,), (10**9,), (3, 4), (10**6, 3), (3, 10**6), (7, 4096, 4096), (2, 2, 2, 2)])
def test_tiles_are_bounded_and_cover(size: tuple[int, ...]) -> None:
    """Never more than the limit, never nothing."""
    shape = tile_shape(size)
    assert len(shape) == len(size)
    assert 0 < torch.Size(shape).numel() <= random.TILE
