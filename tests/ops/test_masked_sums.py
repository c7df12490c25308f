"""Rows of a small batch, which are added up from what each rank has of them: as exchanged, and as of a plain table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, SPECS, assert_close, boxes, chunks, places
from tests.ops.cached_programs import programs_run
from tests.ops.tables import BATCHES, exchanging, shards_close, table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import shardwise
from shardwise import ChunkShardingSpec, EnumerableShardingSpec, ReplicatedShardingSpec, ShardMetadata, from_local
from shardwise.errors import IdRangeError
from shardwise.ops.embedding.lookup import IDS_DECIDE
from shardwise.ops.embedding.masked_sums import MOST_ON_CPU, RowRange, _masked_rows
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

IDS = torch.cat(BATCHES).view(2, 8)
CUT_BY_ROWS = [name for name, spec in SPECS.items() if spec.layout((7, 6)).cuts(0)]


def looked_up(ids: Any, weight: Any, *, padding: int | None = None) -> tuple[Any, Any]:
    """The rows, and the gradient of the table for a loss in which each entry counts another number of times."""
    weight.grad = None
    found = functional.embedding(ids, weight, padding_idx=padding)
    factors = torch.arange(1.0, found.numel() + 1, dtype=torch.float64).view(found.shape)
    (found * factors).sum().backward()
    return found, weight.grad


def assert_as_exchanged(ids: Any, plain_ids: torch.Tensor, weight: Any, *, padding: int | None = None) -> None:
    """Rows and gradient as a plain table gives them, in the layouts that an exchange of rows leaves them in."""
    with exchanging():
        exchanged = looked_up(ids, weight, padding=padding)
    expected = looked_up(plain_ids, table().requires_grad_(), padding=padding)
    for _ in range(2):  # recorded, then a program
        found = looked_up(ids, weight, padding=padding)
        for one, other in zip(found, exchanged, strict=True):
            assert one.sharding == other.sharding
            assert one.dtype == other.dtype
            assert one.requires_grad == other.requires_grad
        shards_close(found[0], expected[0])
        shards_close(found[1], expected[1])
        assert all(map(torch.equal, found[0]._local_tensors(), exchanged[0]._local_tensors()))


@pytest.mark.parametrize("spec", CUT_BY_ROWS)
@ranks(4)
def test_rows_gradients_and_layouts(spec: str) -> None:
    """Uneven boxes, several on a rank, empty ones, ranks without any; ids of all ranks and of each rank."""
    weight = shard_tensor(table(), ALL[spec]).requires_grad_()
    for padding in (None, 0, 3, -1):
        assert_as_exchanged(IDS, IDS, weight, padding=padding)
        assert_as_exchanged(from_local(BATCHES[dist.get_rank()]), IDS.view(-1), weight, padding=padding)


@ranks(4)
def test_ids_in_other_layouts() -> None:
    """Replicas of ids, which give replicas of rows; one id; fewer ids than ranks; 32 bits."""
    weight = shard_tensor(table(), ALL["chunk repeated"]).requires_grad_()
    uneven = boxes(([0, 0], [1, 8], 3), ([1, 0], [1, 8], 0))
    for spec in (ReplicatedShardingSpec(places(3, 1)), chunks(1, 2, 0), uneven):
        assert_as_exchanged(shard_tensor(IDS, spec), IDS, weight)
    for ids in (torch.tensor(5), torch.tensor([6]), torch.tensor([[2], [2], [0]]), IDS.int()):
        assert_as_exchanged(ids, ids, weight)


@ranks(4)
def test_tables_with_replicas() -> None:
    """Rows cut in two, each half on two ranks: a leaf, whose replicas all get the gradient, and the result of an op."""
    mesh = init_device_mesh("cpu", (2, 2))
    parts = table().split([4, 3])[dist.get_rank() // 2].clone()
    weight = from_local(parts, (0, None), mesh=mesh).detach().requires_grad_()
    for ids in (IDS, from_local(IDS.view(-1).split(4)[dist.get_rank()])):
        assert_as_exchanged(ids, ids if ids is IDS else IDS.view(-1), weight, padding=2)
    made: list[Any] = []
    for leaf in (weight, table().requires_grad_()):
        leaf.grad = None
        functional.embedding(IDS, leaf * 2).square().sum().backward()
        made.append(leaf.grad)
    shards_close(*made)


@ranks(4)
def test_a_group_of_some_ranks() -> None:
    """Others take no part."""
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return
    weight = shard_tensor(table(), chunks(0, 3, 1), process_group=group).requires_grad_()
    assert_as_exchanged(IDS, IDS, weight)
    assert_as_exchanged(from_local(IDS[dist.get_rank() // 2], process_group=group), IDS.view(-1), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@ranks(3)
def test_narrow_tables_are_not_rounded(dtype: torch.dtype) -> None:
    """Zeros are added to a row, which keeps its bits."""
    weight = shard_tensor(table().to(dtype), chunks(0, 0, 1, 2))
    found = functional.embedding(IDS, weight)
    assert found.dtype == dtype
    assert torch.equal(found.full_tensor(), table().to(dtype)[IDS])


@ranks(2)
def test_rows_that_nobody_asks_for_do_not_matter() -> None:
    """The first row of a rank stands in for rows of others, whatever the values and the gradients are."""
    plain = table()
    plain[0], plain[4] = float("nan"), float("inf")
    weight, ids = shard_tensor(plain, chunks(0, 0, 1)).requires_grad_(), torch.tensor([1, 2, 3, 5, 6])
    found = functional.embedding(ids, weight)
    assert_close(found.detach().full_tensor(), plain[ids])
    (found * torch.tensor([1.0, 1, float("inf"), 1, 1], dtype=torch.float64)[:, None]).sum().backward()
    assert weight.grad.full_tensor()[[0, 4]].tolist() == [[0.0] * 6] * 2


@ranks(2)
def test_a_second_call_is_a_program() -> None:
    """Also with other ids: one message adds up, one of the backward brings gradients; sharded ids are gathered."""
    weight = shard_tensor(table(), chunks(0, 0, 1)).requires_grad_()
    for gathers, make in ((0, lambda k: IDS.flip(k)), (1, lambda k: shard_tensor(IDS.flip(k), chunks(1, 0, 1)))):
        looked_up(make(0), weight)
        ids = make(1)
        with shardwise.trace() as trace:
            found = functional.embedding(ids, weight)
            found.backward(found.detach())
        assert trace.uncached == []
        kinds = [event.kind for event in trace.events if not event.is_meeting]
        assert kinds == ["all-gather"] * gathers + ["reduce-scatter", "all-gather"]
        assert len(programs_run(functional.embedding, ids, weight)) == 1
        assert_close(found.detach().full_tensor(), table()[IDS.flip(1)])


@ranks(2)
def test_a_module_without_gradients() -> None:
    """Under `no_grad`, in `inference_mode` and under autocast, which does not apply."""
    module = nn.Embedding(7, 6, padding_idx=1, _weight=table().float())
    shardwise.shard_module(module, {"weight": chunks(0, 0, 1)})
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
        for _ in range(2):
            with context:
                found = module(IDS)
            assert found.dtype == torch.float32
            assert torch.equal(found.detach().full_tensor(), table().float()[IDS])


@ranks(3)
def test_wrong_ids_are_refused_on_every_rank() -> None:
    """Before and after a call of the kind was recorded; one rank's own wrong ids are wrong for all. They go on."""
    weight, here = shard_tensor(table(), chunks(0, 0, 1, 2)), dist.get_rank()
    for _ in range(2):
        for wrong in (7, -1):
            with pytest.raises(IdRangeError, match=f"id {wrong} in a table of 7 rows"):
                functional.embedding(torch.tensor([0, wrong]), weight)
            with pytest.raises(IdRangeError, match=f"id {wrong} in a table of 7 rows"):
                functional.embedding(from_local(torch.tensor([wrong if here == 1 else 2])), weight)
        assert_close(functional.embedding(torch.tensor([0, 6]), weight).full_tensor(), table()[[0, 6]])
        own = from_local(torch.tensor([here]))
        assert_close(functional.embedding(own, weight).full_tensor(), table()[:3])
    with pytest.raises(RuntimeError, match="Long, Int"):
        functional.embedding(torch.tensor([0.5]), weight)


def test_the_kernel_sees_ids_beyond_the_table() -> None:
    """Where values are not read on the host, as on a GPU: on the ranks of the first and of the last rows."""
    part = table()[:2]
    assert _masked_rows(torch.tensor([9, 2]), part, RowRange(0, None, 2), None).tolist() == [[0.0] * 6] * 2
    assert _masked_rows(torch.tensor([-1, 4]), part, RowRange(0, 5, None), None).tolist() == [[0.0] * 6] * 2
    for wrong, rows in ((-1, RowRange(0, None, 2)), (7, RowRange(0, 5, None))):
        with pytest.raises(IndexError):
            _masked_rows(torch.tensor([wrong]), part, rows, None)


@ranks(2)
def test_which_rows_are_exchanged() -> None:
    """Those of a large batch, of options that need them whole, and of ids that may not be gathered."""
    weight = shard_tensor(table(), chunks(0, 0, 1))
    own = from_local(IDS[dist.get_rank()])
    most = MOST_ON_CPU // (6 * 8)

    def is_exchanged(ids: Any, **options: Any) -> bool:
        with shardwise.trace() as trace:
            functional.embedding(ids, weight, **options)
        return any(call.reason == IDS_DECIDE for call in trace.uncached)

    assert not is_exchanged(torch.zeros(most, dtype=torch.int64))
    assert is_exchanged(torch.zeros(most + 1, dtype=torch.int64))
    assert not is_exchanged(own)
    assert is_exchanged(from_local(torch.zeros(most // 2 + 1, dtype=torch.int64)))
    for options in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        assert is_exchanged(IDS, **options)
    with shardwise.gather_budget(0):
        assert not is_exchanged(IDS)
        assert is_exchanged(own)


@ranks(2)
def test_columns_and_whole_tables_for_ids_of_each_rank() -> None:
    """Such a table is not cut by rows: each rank sends its columns of the rows, and nothing is masked."""
    for spec in (chunks(1, 0, 1), ChunkShardingSpec(0, places(1)), ReplicatedShardingSpec(places(0, 1))):
        weight = shard_tensor(table(), spec).requires_grad_()
        assert_as_exchanged(from_local(IDS[dist.get_rank()]), IDS.view(-1), weight, padding=5)
    grid = [([0, 0], [5, 2], 0), ([0, 2], [7, 4], 1), ([5, 0], [2, 2], 1)]  # a box with all rows beside others
    spec = EnumerableShardingSpec([ShardMetadata(o, s, f"rank:{r}/cpu") for o, s, r in grid])
    assert_as_exchanged(IDS, IDS, shard_tensor(table(), spec).requires_grad_())
