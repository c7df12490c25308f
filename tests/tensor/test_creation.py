"""Factories: every rank fills its own shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import SIZE, SPECS, boxes, chunks, places, whole

import shardwise
from shardwise import ChunkShardingSpec, ShardedTensor, ShardingSpec, settings
from shardwise.layout.metadata import ShardedTensorMetadata, TensorProperties
from shardwise.testing import ranks


@pytest.mark.parametrize("name", SPECS)
@ranks(4)
def test_constant_factories_make_the_plain_tensor(name: str) -> None:
    """For every kind of layout: right values, right shards, right metadata."""
    spec = SPECS[name]
    assert torch.equal(whole(shardwise.zeros(spec, *SIZE)), torch.zeros(SIZE))
    assert torch.equal(whole(shardwise.ones(spec, SIZE, dtype=torch.int32)), torch.ones(SIZE, dtype=torch.int32))
    tensor = shardwise.full(spec, SIZE, 2.5, dtype=torch.float64, requires_grad=True)
    assert torch.equal(whole(tensor), torch.full(SIZE, 2.5, dtype=torch.float64))
    mine = [s for s in tensor.metadata().shards_metadata if s.placement and s.placement.rank() == dist.get_rank()]
    assert [shard.metadata for shard in tensor.local_shards()] == mine
    assert [list(shard.tensor.shape) for shard in tensor.local_shards()] == [s.shard_sizes for s in mine]
    assert all(shard.tensor.requires_grad for shard in tensor.local_shards())
    assert tensor.metadata().tensor_properties == TensorProperties(torch.float64, requires_grad=True)
    assert tensor.sharding_spec() is spec
    assert shardwise.empty(spec, list(SIZE)).shape == SIZE


@pytest.mark.parametrize("factory", ["rand", "randn"])
@pytest.mark.parametrize("name", SPECS)
@ranks(4)
def test_random_factories_draw_as_the_plain_function_does(factory: str, name: str) -> None:
    """Where each rank draws for itself: from its own generator, shard by shard."""
    torch.manual_seed(100 + dist.get_rank())
    with settings.own_draws():
        tensor = getattr(shardwise, factory)(SPECS[name], *SIZE, dtype=torch.float64)
    torch.manual_seed(100 + dist.get_rank())
    for shard in tensor.local_shards():
        expected = getattr(torch, factory)(tuple(shard.tensor.shape), dtype=torch.float64)
        assert torch.equal(shard.tensor, expected)


@ranks(4)
def test_like_factories_keep_the_layout() -> None:
    """Where each rank draws for itself, they draw as the plain function does on each shard."""
    tensor = shardwise.rand(SPECS["uneven, several per rank"], *SIZE)
    assert torch.equal(whole(torch.zeros_like(tensor)), torch.zeros(SIZE))
    assert torch.equal(whole(torch.ones_like(tensor, dtype=torch.int64)), torch.ones(SIZE, dtype=torch.int64))
    assert torch.equal(whole(torch.full_like(tensor, 7)), torch.full(SIZE, 7.0))
    assert torch.zeros_like(tensor, requires_grad=True).requires_grad
    assert torch.empty_like(tensor)._layout is tensor._layout
    for like in (torch.rand_like, torch.randn_like):
        torch.manual_seed(dist.get_rank())
        with settings.own_draws():
            made = like(tensor)
        torch.manual_seed(dist.get_rank())
        assert all(
            torch.equal(s.tensor, like(o.tensor))
            for s, o in zip(made.local_shards(), tensor.local_shards(), strict=True)
        )
    for made in (torch.zeros_like(tensor, device="meta"), tensor.new_ones(SIZE, device="meta")):
        assert made.is_meta
        assert made._layout.boxes == tensor._layout.boxes
        assert {str(place.device) for place in made._layout.places} == {"meta"}
        assert all(shard.tensor.is_meta for shard in made.local_shards())


@ranks(4)
def test_sub_groups_use_global_ranks() -> None:
    """Ranks of the group hold the shards; outsiders may make the tensor too, and hold none."""
    group = dist.new_group([1, 3])
    tensor = shardwise.ones(chunks(0, 3, 1), 5, 2, process_group=group)
    here = dist.get_rank()
    assert len(tensor.local_shards()) == (here in (1, 3))
    if here in (1, 3):
        assert tensor.local_tensor().shape == ((3, 2) if here == 3 else (2, 2))
        assert torch.equal(whole(tensor), torch.ones(5, 2))
        with pytest.raises(ValueError, match=r"Global rank 2 does not exist in input process group: \[1, 3\]"):
            shardwise.ones(chunks(0, 2, 1), 4, process_group=group)


@ranks(2)
def test_meta_tensors_have_sizes_but_no_data() -> None:
    """For models that are sharded before they are materialised."""
    tensor = shardwise.zeros(ChunkShardingSpec(0, places(0, 1, device="meta")), 2**20, 2**20)
    assert tensor.is_meta
    assert tensor.device == torch.device("meta")
    assert tensor.local_tensor().shape == (2**19, 2**20)
    assert tensor.clone().is_meta


@ranks(2)
def test_scalars_and_tensors_without_elements() -> None:
    """Zero dims, and dims of size zero."""
    scalar = shardwise.full(boxes(([], [], 1)), (), 3.0)
    assert scalar.shape == ()
    assert torch.equal(whole(scalar), torch.tensor(3.0))
    assert whole(shardwise.ones(chunks(0, 0, 1), 0, 3)).shape == (0, 3)


@pytest.mark.parametrize("make", ["full", "rand"])
@ranks(2)
def test_what_cannot_be_filled_raises_on_ranks_without_shards_too(make: str) -> None:
    """Nobody goes on alone."""
    spec = chunks(0, 1)
    with pytest.raises((TypeError, NotImplementedError, RuntimeError)):
        _ = shardwise.full(spec, (4,), "x") if make == "full" else shardwise.rand(spec, 4, dtype=torch.int64)
    assert shardwise.ones(spec, 4).shape == (4,)


@ranks(2)
def test_different_factories_at_the_same_time_are_found_out() -> None:
    """By name, and by the value they fill with."""
    with pytest.raises(ValueError, match="verb property does not match"):
        _ = shardwise.zeros(chunks(0, 0, 1), 4) if dist.get_rank() else shardwise.ones(chunks(0, 0, 1), 4)
    with pytest.raises(ValueError, match="verb property does not match"):
        shardwise.full(chunks(0, 0, 1), (4,), float(dist.get_rank()))


class Lopsided(ChunkShardingSpec):
    """A user's spec that derives from one of ours and cuts otherwise."""

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """All but one row on the first rank."""
        return HalvesSpec().build_metadata(tensor_sizes, tensor_properties)


@ranks(2)
def test_a_derived_spec_that_cuts_otherwise_is_asked() -> None:
    """Not its base."""
    assert shardwise.ones(Lopsided(0, places(0, 1)), 9).local_tensor().shape == ((8,) if dist.get_rank() == 0 else (1,))


@ranks(2)
def test_the_default_dtype_is_torchs() -> None:
    """Of the moment, not of the import."""
    try:
        torch.set_default_dtype(torch.float64)
        assert shardwise.zeros(chunks(0, 0, 1), 4).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("spec", "size", "options", "message"),
    [
        ("not a spec", (4,), {}, "Expecting ShardingSpec but got"),
        (chunks(0, 0, 1), (4,), {"layout": torch.sparse_coo}, "Only torch.strided layout is currently supported"),
        (
            chunks(0, 0, 1),
            (4,),
            {"memory_format": torch.channels_last},
            "Only torch.contiguous_format memory_format is currently supported",
        ),
        (chunks(1, 0, 1), (4,), {}, "Invalid sharding dim"),
        (chunks(0, 0, 5), (4,), {}, "Global rank 5 does not exist in input process group"),
        (chunks(0, 0, 1), (4.5,), {}, "size has to be a sequence of ints"),
        (boxes(([0], [3], 0)), (4,), {}, "does not match tensor volume"),
        (ChunkShardingSpec(0, ["cpu", "cpu"]), (4,), {}, "names no rank"),
    ],
)
@ranks(2)
def test_wrong_arguments_raise_on_every_rank(spec: Any, size: Any, options: dict[str, Any], message: str) -> None:
    """As ValueError, before anything is allocated."""
    with pytest.raises(ValueError, match=message):
        shardwise.empty(spec, *size, **options)


@ranks(2)
def test_integers_cannot_require_grad_on_any_rank() -> None:
    """torch's own error, on all ranks."""
    with pytest.raises(RuntimeError, match="Only Tensors of floating point"):
        shardwise.zeros(chunks(0, 0, 1), 4, dtype=torch.int64, requires_grad=True)


@pytest.mark.parametrize("what", ["dtype", "global_size", "sharding_spec", "requires_grad", "a rank that raises"])
@ranks(4)
def test_ranks_that_disagree_all_raise(what: str) -> None:
    """The same error everywhere, that names what differs and where."""
    odd = dist.get_rank() == 2
    spec: Any = chunks(0, 0, 1, 2, 3)
    size, options = [8, 8], {}
    if what == "dtype":
        options = {"dtype": torch.float64 if odd else torch.float32}
    elif what == "global_size":
        size = [8, 9 if odd else 8]
    elif what == "sharding_spec":
        spec = chunks(1 if odd else 0, 0, 1, 2, 3)
    elif what == "requires_grad":
        options = {"requires_grad": odd}
    elif odd:
        spec = "rows"
    expected = "Expecting ShardingSpec but got" if what == "a rank that raises" else f"ShardedTensor {what} property"
    with pytest.raises(ValueError, match=expected) as caught:
        shardwise.zeros(spec, *size, **options)
    texts: list[str] = [""] * 4
    dist.all_gather_object(texts, f"{type(caught.value)} {caught.value}")
    assert len(set(texts)) == 1
    assert "rank" in texts[0]
    assert "2" in texts[0]


class HalvesSpec(ShardingSpec):
    """A spec of a user's own, written for the old system: it only builds metadata."""

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """The first rank holds all rows but one."""
        return boxes(([0], [tensor_sizes[0] - 1], 0), ([tensor_sizes[0] - 1], [1], 1)).build_metadata(
            tensor_sizes, tensor_properties
        )


@ranks(2)
def test_a_spec_of_ones_own_works_everywhere() -> None:
    """It needs `build_metadata` and nothing else."""
    tensor = shardwise.ones(HalvesSpec(), 9)
    assert isinstance(tensor, ShardedTensor)
    assert tensor.local_tensor().shape == ((8,) if dist.get_rank() == 0 else (1,))
    assert torch.equal(whole(tensor.clone()), torch.ones(9))
