"""Tensors put together from what each rank holds."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import SIZE, SPECS, boxes, chunks, whole

from shardwise import ChunkShardingSpec, EnumerableShardingSpec, ShardedTensor, ShardMetadata, zeros
from shardwise.layout.metadata import ShardedTensorMetadata, TensorProperties
from shardwise.tensor import Shard, ShardedTensorBase, init_from_local_shards, shard_tensor
from shardwise.tensor.metadata_merge import build_global_metadata, build_metadata_from_local_shards
from shardwise.tensor.shard import narrow_tensor
from shardwise.testing import ranks

PLAIN = torch.arange(42.0).reshape(SIZE)


def cut(name: str) -> tuple[list[Shard], ShardedTensorMetadata]:
    """This rank's shards of PLAIN, and the metadata of all, for one of the shared layouts."""
    metadata = SPECS[name].build_metadata(torch.Size(SIZE), TensorProperties())
    shards = []
    for record in metadata.shards_metadata:
        if record.placement and record.placement.rank() == dist.get_rank():
            index = tuple(slice(o, o + s) for o, s in zip(record.shard_offsets, record.shard_sizes, strict=True))
            shards.append(Shard(PLAIN[index].contiguous(), record))
    return shards, metadata


@pytest.mark.parametrize("name", SPECS)
@ranks(4)
def test_from_local_shards(name: str) -> None:
    """Every layout, whatever each rank brings."""
    shards, metadata = cut(name)
    tensor = init_from_local_shards(shards, *SIZE)
    assert torch.equal(whole(tensor), PLAIN)
    assert all(a is b for a, b in zip(tensor.local_shards(), shards, strict=True))
    assert sorted(map(repr, tensor.metadata().shards_metadata)) == sorted(map(repr, metadata.shards_metadata))
    assert isinstance(tensor.sharding_spec(), ChunkShardingSpec if name.startswith("chunk") else object)


@pytest.mark.parametrize("name", SPECS)
@ranks(4)
def test_from_local_shards_and_global_metadata(name: str) -> None:
    """Every layout, without communication; the base class needs no group at all."""
    shards, metadata = cut(name)
    tensor = ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata)
    assert torch.equal(whole(tensor), PLAIN)
    given = ShardedTensor._init_from_local_shards_and_global_metadata(shards, metadata, sharding_spec=SPECS[name])
    assert given.sharding_spec() is SPECS[name]
    base = ShardedTensorBase._init_from_local_shards_and_global_metadata(shards, metadata, SPECS[name])
    assert base._process_group is None
    assert base.local_shards() is shards
    assert base.metadata().size == torch.Size(SIZE)
    assert [s.metadata for s in base.clone().local_shards()] == [s.metadata for s in shards]


def test_the_base_class_works_where_there_is_no_distributed_at_all() -> None:
    """In a plain process."""
    metadata = chunks(0, 0, 1).build_metadata(torch.Size([4]), TensorProperties())
    base = ShardedTensorBase._init_from_local_shards_and_global_metadata(
        [Shard(torch.ones(2), metadata.shards_metadata[1])], metadata
    )
    assert repr(base) == "ShardedTensorBase((4,), torch.float32, 2 shards on 2 ranks, here [2:4] on cpu)"


@ranks(4)
def test_a_size_that_is_not_known_is_worked_out() -> None:
    """None: shards lie behind each other in the order of the ranks, uneven and empty ones too."""
    rank = dist.get_rank()
    rows = [3, 0, 5, 2][rank]
    shard = Shard.from_tensor_and_offsets(torch.full((rows, 4), float(rank)), [0, 0], rank)
    tensor = init_from_local_shards([shard], None, 4)
    expected = torch.cat([torch.full((n, 4), float(k)) for k, n in enumerate([3, 0, 5, 2])])
    assert torch.equal(whole(tensor), expected)
    assert shard.metadata.shard_offsets == [0, 0]  # the caller's own record stays
    assert torch.equal(whole(init_from_local_shards([shard], (None, None))), expected)
    column = Shard.from_tensor_and_offsets(torch.full((4, rows), float(rank)), [0, 0], rank)
    assert torch.equal(whole(init_from_local_shards([column], 4, None)), expected.T)


@ranks(4)
def test_records_of_empty_chunks_beyond_the_end_are_taken() -> None:
    """Those that a spec gives, in every way that shards are put together, and in pickles."""
    plain = torch.arange(10.0).reshape(5, 2)
    spec = chunks(0, 3, 2, 0, 1)  # the chunk of rank 1 is empty, and said to begin at 6
    metadata = spec.build_metadata(plain.size(), TensorProperties())
    records = metadata.shards_metadata
    assert [record.shard_offsets for record in records] == [[0, 0], [2, 0], [4, 0], [6, 0]]
    mine = next(record for record in records if record.placement.rank() == dist.get_rank())
    shard = Shard(narrow_tensor(plain, mine).clone(), mine)
    made = [
        init_from_local_shards([shard], 5, 2),
        init_from_local_shards([shard], None, 2),
        ShardedTensor._init_from_local_shards_and_global_metadata([shard], metadata),
        ShardedTensor._init_from_local_tensor(shard.tensor, spec, 5, 2),
        shard_tensor(plain, EnumerableShardingSpec(records)),
        shard_tensor(plain, spec),
    ]
    made.append(pickle.loads(pickle.dumps(made[-1])))
    for tensor in made:
        assert sorted(map(str, tensor.metadata().shards_metadata)) == sorted(map(str, records))
        assert str(tensor.local_shards()[0].metadata) == str(mine)
        assert torch.equal(tensor.full_tensor(), plain)
        assert torch.equal((tensor[1:] * 2).full_tensor(), plain[1:] * 2)


@ranks(4)
def test_working_it_out_with_several_shards_or_none() -> None:
    """As many as each rank has; offsets that fit are kept."""
    rank = dist.get_rank()
    shards = [Shard.from_tensor_and_offsets(torch.full((1,), 10.0 * rank + k), [0], rank) for k in range(rank)]
    tensor = init_from_local_shards(shards, None)
    assert whole(tensor).tolist() == [10, 20, 21, 30, 31, 32]
    backwards = Shard.from_tensor_and_offsets(torch.full((2,), float(rank)), [2 * (3 - rank)], rank)
    assert whole(init_from_local_shards([backwards], None)).tolist() == [3, 3, 2, 2, 1, 1, 0, 0]
    with pytest.raises(ValueError, match="have no local shards on all ranks"):
        init_from_local_shards([], None)


@ranks(4)
def test_sub_groups_assemble_by_global_rank() -> None:
    """Only the members take part."""
    group = dist.new_group([0, 2])
    rank = dist.get_rank()
    if rank in (0, 2):
        shard = Shard.from_tensor_and_offsets(torch.full((2,), float(rank)), [rank], rank)
        tensor = init_from_local_shards([shard], 4, process_group=group)
        assert whole(tensor).tolist() == [0, 0, 2, 2]
        with pytest.raises(ValueError, match="rank does not match with the rank in its process group"):
            init_from_local_shards(
                [Shard.from_tensor_and_offsets(torch.ones(2), [rank], 2 - rank)], 4, process_group=group
            )


@ranks(4)
def test_from_one_local_tensor_and_a_spec() -> None:
    """The tensor is this rank's shard, and stays the same object."""
    rank = dist.get_rank()
    local = torch.full((2, 3), float(rank))
    tensor = ShardedTensor._init_from_local_tensor(local, chunks(0, 3, 2, 1, 0), 8, 3)
    assert tensor.local_tensor() is local
    assert whole(tensor)[:, 0].tolist() == [3, 3, 2, 2, 1, 1, 0, 0]
    with pytest.raises(ValueError, match="local_tensor is not a contiguous Tensor"):
        ShardedTensor._init_from_local_tensor(torch.ones(3, 2).t(), chunks(0, 3, 2, 1, 0), 8, 3)
    with pytest.raises(ValueError, match=r"Shard tensor size does not match with metadata.shard_lengths"):
        ShardedTensor._init_from_local_tensor(torch.ones(3, 3), chunks(0, 3, 2, 1, 0), 8, 3)
    with pytest.raises(RuntimeError, match="puts 2 shards on rank"):
        ShardedTensor._init_from_local_tensor(local, chunks(0, 0, 0, 1, 1, 2, 2, 3, 3), 8, 3)


def shard_of(tensor: torch.Tensor, offsets: list[int], rank: int | None = None) -> Shard:
    """A shard on this rank, or on another."""
    return Shard.from_tensor_and_offsets(tensor, offsets, dist.get_rank() if rank is None else rank)


def wrong_shards(what: str) -> tuple[list[Shard], list[int], str]:
    """What each rank brings in one of the broken cases, and what the error must say."""
    rank = dist.get_rank()
    good = shard_of(torch.ones(2, 2), [2 * rank, 0])
    odd = rank == 1
    if what == "overlap":
        return [shard_of(torch.ones(2, 2), [2 * rank - odd, 0])], [8, 2], "overlap"
    if what == "gap":
        return [good], [9, 2], "does not match tensor volume"
    if what == "beyond":
        return [good], [7, 2], "exceeds tensor dim"
    if what == "other size":
        return [good], [8 + odd, 2], "ShardedTensor global_size property does not match from different ranks!"
    if what == "other dtype":
        dtype = torch.float64 if odd else torch.float32
        return (
            [shard_of(torch.ones(2, 2, dtype=dtype), [2 * rank, 0])],
            [8, 2],
            "ShardedTensor dtype property does not match",
        )
    if what == "other requires_grad":
        return (
            [shard_of(torch.ones(2, 2, requires_grad=odd), [2 * rank, 0])],
            [8, 2],
            "ShardedTensor requires_grad property does not match from different ranks!",
        )
    if what == "mixed dtypes on one rank":
        extra = [shard_of(torch.ones(1, 2, dtype=torch.int8), [8, 0])] if odd else []
        return [good, *extra], [9, 2], "Local shards' tensor dtype property need to be the same"
    if what == "mixed requires_grad on one rank":
        extra = [shard_of(torch.ones(1, 2, requires_grad=True), [8, 0])] if odd else []
        return [good, *extra], [9, 2], "Local shards' tensor requires_grad property need to be the same"
    if what == "not contiguous":
        tensor = torch.ones(2, 2).t() if odd else torch.ones(2, 2)
        return [shard_of(tensor, [2 * rank, 0])], [8, 2], "Only torch.contiguous_format memory_format"
    if what == "sparse":
        tensor = torch.ones(2, 2).to_sparse() if odd else torch.ones(2, 2)
        return [shard_of(tensor, [2 * rank, 0])], [8, 2], "Only torch.strided layout is currently supported"
    if what == "another's rank":
        return (
            [shard_of(torch.ones(2, 2), [2 * rank, 0], 0 if odd else rank)],
            [8, 2],
            "rank does not match with the rank",
        )
    if what == "no placement":
        shard = Shard(torch.ones(2, 2), ShardMetadata([2 * rank, 0], [2, 2])) if odd else good
        return [shard], [8, 2], "remote device is None"
    if what == "not a list of shards":
        return (["shard"] if odd else [good]), [8, 2], "must be a list of Shard"
    raise KeyError(what)


WRONG = """
overlap;gap;beyond;other size;other dtype;other requires_grad;mixed dtypes on one rank;mixed requires_grad on one rank;
not contiguous;sparse;another's rank;no placement;not a list of shards
"""


@pytest.mark.parametrize("what", [word.strip() for word in WRONG.split(";")])
@ranks(4)
def test_shards_that_do_not_fit_raise_the_same_on_every_rank(what: str) -> None:
    """Whoever is wrong, nobody hangs and everybody learns the same."""
    shards, size, message = wrong_shards(what)
    if what == "sparse" and dist.get_rank() == 1:
        shards[0].tensor = torch.ones(2, 2).to_sparse()
    with pytest.raises(ValueError, match=message) as caught:
        init_from_local_shards(shards, *size)
    texts: list[str] = [""] * 4
    dist.all_gather_object(texts, f"{type(caught.value)} {caught.value}")
    assert len(set(texts)) == 1


@ranks(4)
def test_one_rank_in_another_verb_is_found_out() -> None:
    """All raise instead of waiting for each other."""
    rank = dist.get_rank()
    shards = [shard_of(torch.ones(2), [2 * rank])]
    with pytest.raises(ValueError, match="property does not match from different ranks"):
        _ = zeros(chunks(0, 0, 1, 2, 3), 8) if rank == 3 else init_from_local_shards(shards, 8)


@ranks(2)
def test_global_metadata_must_match_the_local_shards() -> None:
    """Number, properties, boxes, layout: with the words that callers match on."""
    rank = dist.get_rank()
    spec = chunks(0, 0, 1)
    metadata = spec.build_metadata(torch.Size([4, 2]), TensorProperties())
    record = metadata.shards_metadata[rank]

    def attempt(shards: list[Shard], changed: ShardedTensorMetadata = metadata) -> Any:
        return ShardedTensor._init_from_local_shards_and_global_metadata(shards, changed)

    with pytest.raises(RuntimeError, match="does not match number of local shards metadata"):
        attempt([])
    wrong = [
        (torch.ones(2, 2, dtype=torch.int32), "Local shards' tensor dtype property is incompatible with"),
        (torch.ones(2, 2, requires_grad=True), "Local shards' tensor requires_grad property is incompatible with"),
        (torch.ones(2, 2).t(), "Only torch.contiguous_format memory_format is currently supported"),
    ]
    for tensor, message in wrong:
        with pytest.raises(ValueError, match=message):
            attempt([Shard(tensor, record)])
    shard = Shard(torch.ones(2, 2), record)
    shard.tensor = torch.ones(3, 2)
    with pytest.raises(ValueError, match="Local shards' tensor size property is incompatible with local ShardMetadata"):
        attempt([shard])
    pinned = ShardedTensorMetadata(metadata.shards_metadata, metadata.size, TensorProperties(pin_memory=True))
    with pytest.raises(ValueError, match="Local shards' tensor pin_memory property is incompatible with"):
        attempt([Shard(torch.ones(2, 2), record)], pinned)
    sparse = ShardedTensorMetadata(metadata.shards_metadata, metadata.size, TensorProperties(layout=torch.sparse_coo))
    with pytest.raises(ValueError, match=r"Only torch.strided layout is currently supported"):
        attempt([Shard(torch.ones(2, 2), record)], sparse)
    with pytest.raises(ValueError, match="must not be empty"):
        attempt([], ShardedTensorMetadata([], torch.Size([4, 2])))
    with pytest.raises(ValueError, match="is not among this rank's shards"):
        attempt([Shard(torch.ones(2, 2), ShardMetadata([1, 0], [2, 2], f"rank:{rank}/cpu"))])
    larger = ShardedTensorMetadata(metadata.shards_metadata, torch.Size([5, 2]))
    with pytest.raises(ValueError, match="do not cover the entire tensor"):
        attempt([Shard(torch.ones(2, 2), record)], larger)


@ranks(2)
def test_metadata_of_all_zero_sizes_and_local_views() -> None:
    """A tensor without elements; and a shard that is a view into a larger tensor stays a view."""
    rank = dist.get_rank()
    empty = boxes(([0, 0], [0, 3], 0), ([0, 0], [0, 3], 1)).build_metadata(torch.Size([0, 3]), TensorProperties())
    tensor = ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(torch.empty(0, 3), empty.shards_metadata[rank])], empty
    )
    assert tensor.shape == (0, 3)
    backing = torch.zeros(10)
    metadata = chunks(0, 0, 1).build_metadata(torch.Size([8]), TensorProperties())
    view = ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(backing[3:7], metadata.shards_metadata[rank])], metadata
    )
    view.local_tensor().fill_(1)
    assert backing.sum() == 4


@ranks(2)
def test_a_local_shard_may_get_another_tensor() -> None:
    """Other libraries assign to it; from then on that is the tensor's data."""
    tensor = zeros(chunks(0, 0, 1), 4)
    tensor.local_shards()[0].tensor = torch.full((2,), 5.0)
    assert tensor.local_tensor().tolist() == [5, 5]
    assert whole(tensor.clone()).tolist() == [5, 5, 5, 5]


def test_a_shard_must_fit_its_metadata() -> None:
    """Size and device; without a placement any device will do."""
    with pytest.raises(ValueError, match=r"Shard tensor size does not match with metadata.shard_lengths"):
        Shard(torch.ones(2), ShardMetadata([0], [3]))
    with pytest.raises(ValueError, match="Local shard tensor device does not match with local Shard's placement"):
        Shard(torch.ones(3), ShardMetadata([0], [3], "rank:0/cuda:0"))
    assert Shard(torch.ones(3, device="meta"), ShardMetadata([0], [3])).metadata.placement is None


@ranks(2)
def test_the_old_systems_two_halves() -> None:
    """Local metadata from shards, and global metadata from everyone's."""
    rank = dist.get_rank()
    group: Any = dist.group.WORLD
    local = build_metadata_from_local_shards([shard_of(torch.ones(2), [2 * rank])], torch.Size([4]), rank, group)
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, local)
    assert (
        build_global_metadata([*gathered, None]).shards_metadata
        == chunks(0, 0, 1).build_metadata(torch.Size([4]), TensorProperties()).shards_metadata
    )
    for part in gathered:
        part.shards_metadata[0].shard_offsets = [0]
    worked_out = build_global_metadata(gathered, recalc_metadata=True)
    assert [shard.shard_offsets for shard in worked_out.shards_metadata] == [[0], [2]]
    with pytest.raises(ValueError, match="have no local shards on all ranks"):
        build_global_metadata([None, None])
    with pytest.raises(ValueError, match="must have local shards"):
        build_metadata_from_local_shards([], torch.Size([4]), rank, group)


@ranks(2)
def test_inferred_specs() -> None:
    """Chunks are recognised, other boxes are enumerated."""
    rank = dist.get_rank()
    even = init_from_local_shards([shard_of(torch.ones(2), [2 * rank])], 4)
    assert even.sharding_spec() == chunks(0, 0, 1)
    uneven = init_from_local_shards([shard_of(torch.ones(1 + rank), [rank])], 3)
    assert isinstance(uneven.sharding_spec(), EnumerableShardingSpec)
