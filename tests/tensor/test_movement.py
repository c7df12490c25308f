"""Scatter, gather, redistribute, reshard, copy: against the plain tensor, on real ranks."""

from __future__ import annotations

import itertools
import random
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, PLAIN, SIZE, SPECS, boxes, chunks, holds, places, whole
from tests.patience import PATIENT

import shardwise
from shardwise import GridShardingSpec, ReplicatedShardingSpec, ShardingSpec, make_plan
from shardwise.comm.transfer import execute
from shardwise.errors import ProcessGroupError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

DTYPES = [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int8, torch.float64, torch.int64]


@pytest.mark.parametrize("source", ALL)
@ranks(4)
def test_from_every_layout_to_every_layout(source: str) -> None:
    """Whole, in tiny rounds, and asynchronously."""
    tensor = shard_tensor(PLAIN, ALL[source])
    assert holds(tensor, PLAIN)
    for name, spec in ALL.items():
        for options in ({}, {"max_bytes": 40}, {"max_bytes": 1}):
            moved = tensor.redistribute(spec, **options)
            assert holds(moved, PLAIN), (source, name, options)
            assert moved.sharding_spec() is spec
        assert holds(tensor.redistribute(spec, async_op=True).wait(), PLAIN)
        assert holds(tensor, PLAIN)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ranks(4)
def test_every_dtype_travels_as_bytes(dtype: torch.dtype) -> None:
    """Bit for bit, also what has no arithmetic."""
    plain = torch.randint(0, 2, SIZE).to(dtype) if dtype == torch.bool else torch.rand(SIZE).mul(9).to(dtype)
    tensor = shard_tensor(plain, SPECS["uneven, several per rank"])
    assert holds(tensor.redistribute(chunks(1, 3, 1, 0)), plain)
    assert torch.equal(tensor.full_tensor().view(torch.uint8), plain.view(torch.uint8))


@ranks(4)
def test_dtypes_that_cannot_be_copied_travel_by_rows() -> None:
    """Of a dtype that torch knows by name only, rows in one run are moved as the bytes that they are, on a rank too."""
    numbers = torch.arange(torch.Size(SIZE).numel(), dtype=torch.uint8).view(SIZE)
    tensor = shard_tensor(numbers.view(torch.uint4), chunks(0, 0, 1, 2, 3))
    for spec in (chunks(0, 1, 0, 3, 2), chunks(0, 1, 2)):
        tensor = tensor.redistribute(spec)
        assert torch.equal(tensor.full_tensor().view(torch.uint8), numbers)


@ranks(4)
def test_one_element_of_any_stride_moves() -> None:
    """Torch calls one element contiguous whatever its stride is, and sees its bytes for a stride of 1 alone."""
    before, after = chunks(0, 0, 1, 2, 3).layout((4,)), chunks(0, 0, 1).layout((4,))
    mine = torch.empty_strided((1,), (5,)).fill_(dist.get_rank())
    moved = execute.move(make_plan(before, after), [mine], dist.group.WORLD, dtype=mine.dtype).wait()
    assert [part.tolist() for part in moved] == [[[0, 1]], [[2, 3]], [], []][dist.get_rank()]


@ranks(4)
def test_only_members_of_a_group_move() -> None:
    """Also where nothing is sent: an outsider gets an error, not an empty result."""
    group = dist.new_group([0, 1])
    layout = chunks(0, 0, 1).layout(SIZE)
    options = {"dtype": torch.float32, "verb": "a move to where it is"}
    if dist.get_rank() < 2:
        (local,) = execute.move(
            make_plan(layout, layout), [torch.ones(layout.extent(dist.get_rank()))], group, **options
        ).wait()
        assert local.sum() == local.numel()
    else:
        with pytest.raises(ProcessGroupError, match="not in the process group"):
            execute.move(make_plan(layout, layout), [], group, **options)


@ranks(4)
def test_random_layouts() -> None:
    """Two hundred pairs, the same on every rank; the bytes on the wire are the least possible."""
    rng = random.Random(1)
    wire = [0, 0]  # bytes received and sent
    original = execute.AllToAll._begin

    def counted(self: Any, given: Any, taken: Any, tag: int) -> Any:
        wire[:] = [sum(memory.nbytes for _, memory in side) for side in (taken, given)]
        return original(self, given, taken, tag)

    execute.AllToAll._begin = counted
    try:
        for _ in range(200):
            size = tuple(rng.randint(0, 7) for _ in range(rng.randint(1, 3)))
            plain = torch.arange(float(torch.Size(size).numel())).reshape(size)
            one, other = random_spec(rng, size), random_spec(rng, size)
            tensor = shard_tensor(plain, one)
            wire[:] = 0, 0
            moved = tensor.redistribute(other)
            here, plan = dist.get_rank(), make_plan(tensor._layout, moved._layout)
            assert wire == [plan.received(here) * 4, plan.sent(here) * 4]
            assert plan.moved == plan.lower_bound
            assert holds(moved, plain)
    finally:
        execute.AllToAll._begin = original


def random_spec(rng: random.Random, size: tuple[int, ...]) -> ShardingSpec:
    """Any kind of spec that can cut this size, on four ranks."""
    kind = rng.choice(["chunk", "grid", "boxes", "replicated"])
    if kind == "chunk":
        return chunks(rng.randrange(len(size)), *[rng.randrange(4) for _ in range(rng.randint(1, 6))])
    if kind == "replicated":
        return ReplicatedShardingSpec(places(*rng.sample(range(4), rng.randint(1, 4))))
    if kind == "grid" and len(size) > 1:
        dims = rng.sample(range(len(size)), 2)
        return GridShardingSpec(dims, [places(*[rng.randrange(4) for _ in range(3)]) for _ in range(2)])
    pieces = [([0] * len(size), list(size))]
    for _ in range(rng.randint(0, 5)):
        low, high = pieces.pop(rng.randrange(len(pieces)))
        dim = rng.randrange(len(size))
        at = rng.randint(low[dim], high[dim])
        below, above = list(high), list(low)
        below[dim] = above[dim] = at
        pieces += [(low, below), (above, high)]
    return boxes(*[(low, [h - a for a, h in zip(low, high, strict=True)], rng.randrange(4)) for low, high in pieces])


@pytest.mark.parametrize("name", ALL)
@ranks(4)
def test_gather_and_full_tensor(name: str) -> None:
    """To each rank in turn, into memory that is there; and to all."""
    tensor = shard_tensor(PLAIN, ALL[name])
    for dst in range(4):
        out = torch.full(SIZE, -1.0) if dist.get_rank() == dst else None
        tensor.gather(dst, out)
        assert out is None or torch.equal(out, PLAIN)
    assert torch.equal(tensor.full_tensor(), PLAIN)
    half = torch.empty(SIZE, dtype=torch.float64) if dist.get_rank() == 0 else None
    (tensor.clone()).gather(0, half, dtype=torch.float16)
    assert half is None or torch.equal(half, PLAIN.half().double())
    strided = torch.empty(6, 7).t() if dist.get_rank() == 1 else None
    tensor.gather(1, strided)
    assert strided is None or torch.equal(strided, PLAIN)


@ranks(4)
def test_gather_in_a_sub_group() -> None:
    """Where the old system fails: ranks of the group are counted within it, placements are global."""
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        tensor = shard_tensor(PLAIN, chunks(1, 3, 1), src_rank=1, process_group=group)
        out = torch.empty(SIZE) if dist.get_rank() == 3 else None
        tensor.gather(1, out)
        assert out is None or torch.equal(out, PLAIN)
        assert torch.equal(tensor.redistribute(chunks(0, 1, 3)).full_tensor(), PLAIN)


@ranks(4)
def test_between_groups() -> None:
    """That overlap, contain or avoid each other; every rank there is takes part, whether it holds something or not."""
    rank = dist.get_rank()
    members = [(0, 1), (2, 3), (1, 2), (0, 1, 2), (3,), (0, 1, 2, 3)]
    groups = {ranks_: dist.new_group(list(ranks_)) for ranks_ in members}
    for source, target in itertools.permutations(members, 2):
        tensor = shard_tensor(PLAIN, chunks(0, *source), process_group=groups[source])
        moved = tensor.redistribute(chunks(1, *reversed(target)), process_group=groups[target])
        assert len(moved.local_shards()) == (rank in target)
        assert holds(moved, PLAIN)
        assert moved._process_group is groups[target]
        assert holds(tensor.redistribute(chunks(0, *target), process_group=groups[target], max_bytes=50), PLAIN)


@ranks(4)
def test_reshard_in_place() -> None:
    """The same object, with its gradient; a cycle of ranks, and uneven rows to columns, where the old one dies."""
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1, 2)).requires_grad_()
    for shard in tensor.local_shards():
        shard.tensor.grad = shard.tensor.detach() * 2
    for spec in (chunks(0, 1, 2, 0), chunks(1, 0, 1, 2, 3), SPECS["uneven, several per rank"], chunks(0, 3)):
        assert tensor.reshard(spec) is tensor
        assert tensor.sharding_spec() is spec
        assert holds(tensor, PLAIN)
        assert tensor.is_leaf
        assert tensor.requires_grad
        records = spec.build_metadata(torch.Size(SIZE), None).shards_metadata  # by rank, as the old system lists them
        assert tensor.metadata().shards_metadata == sorted(records, key=lambda record: record.placement.rank())
        if tensor.local_shards():
            assert tensor.grad is not None
            assert holds(tensor.grad, PLAIN * 2)
    before = [shard.tensor for shard in tensor.local_shards()]
    tensor.reshard(chunks(0, 3))  # as it is
    assert all(shard.tensor is other for shard, other in zip(tensor.local_shards(), before, strict=True))


@ranks(4)
def test_reshard_of_a_recorded_result_is_recorded() -> None:
    """The gradient comes back through it, whoever held shards before and after; the plain tensor has the same."""
    for name, spec in ALL.items():
        tensor = shard_tensor(PLAIN, chunks(0, 0, 3)).requires_grad_()
        result = tensor * 2
        assert result.reshard(spec) is result
        assert not result.is_leaf, name
        assert holds(result, PLAIN * 2)
        (result * PLAIN).sum().backward()
        assert tensor.grad is not None, name
        assert holds(tensor.grad, PLAIN * 2), name


@ranks(4)
def test_every_spec_can_shard() -> None:
    """From any source rank; only its values matter, and the shards are leaves that want a gradient if it does."""
    for name, spec in ALL.items():
        for src_rank in range(4):
            mine = src_rank == dist.get_rank()
            given = PLAIN.clone().requires_grad_() if mine else torch.empty(SIZE, requires_grad=True, device="meta")
            tensor = spec.shard(given, src_rank)
            assert holds(tensor, PLAIN), name
            assert all(shard.tensor.is_leaf and shard.tensor.requires_grad for shard in tensor.local_shards())


@ranks(4)
def test_a_tensor_of_any_strides_can_be_sharded() -> None:
    """Turned, stepped, expanded, conjugated, zeros without memory; each rank's may have others."""
    views = {
        "turned": PLAIN.reshape(6, 7).t(),
        "stepped": torch.arange(84.0).reshape(7, 12)[:, ::2],
        "expanded": torch.arange(7.0).unsqueeze(1).expand(SIZE),
        "conjugated": torch.complex(PLAIN, PLAIN + 1).conj(),
        "negated": torch.complex(PLAIN, PLAIN + 1).conj().imag,
        "one column": torch.arange(84.0).reshape(2, 42)[1].reshape(6, 7).t(),
        "zeros without memory": torch._efficientzerotensor(SIZE),
    }
    for view in views.values():
        expected = view.resolve_conj().resolve_neg().contiguous().clone()
        for spec in ALL.values():
            for given in (view, view if dist.get_rank() else expected, view if dist.get_rank() == 0 else expected):
                tensor = shard_tensor(given, spec)
                assert holds(tensor, expected)
                assert all(shard.tensor.is_contiguous() for shard in tensor.local_shards())


@ranks(4)
def test_zeros_that_are_not_in_memory_are_moved() -> None:
    """Torch gives such gradients, as of `sgn`: they are added up, put together and moved, also in rounds."""
    for name, spec in ALL.items():
        for other in ALL.values():
            leaf = spec.shard(PLAIN).requires_grad_()
            result = leaf.redistribute(other).sgn()
            result.backward(torch.ones_like(result))
            assert leaf.grad is not None
            assert torch.equal(leaf.grad.full_tensor(), torch.zeros(SIZE)), name
            leaf.grad = None
            leaf.sgn().backward(torch.ones_like(leaf))
            for options in ({}, {"max_bytes": 24}):
                assert holds(leaf.grad.redistribute(other, **options), torch.zeros(SIZE)), name


@ranks(2)
def test_asynchronous_rounds_may_be_finished_in_any_order_or_not_at_all() -> None:
    """On each rank its own."""
    one, two = shard_tensor(PLAIN, chunks(0, 0, 1)), shard_tensor(PLAIN * 2, chunks(0, 0, 1))
    first, second = (t.redistribute(chunks(1, 1, 0), async_op=True, max_bytes=16) for t in (one, two))
    one.redistribute(chunks(1, 1, 0), async_op=True, max_bytes=10**6)  # and dropped
    done = [first.wait(), second.wait()] if dist.get_rank() else [second.wait(), first.wait()][::-1]
    assert holds(done[0], PLAIN)
    assert holds(done[1], PLAIN * 2)
    assert torch.equal(one.full_tensor(), PLAIN)


@ranks(2)
def test_asynchronous_rounds_that_nobody_waits_for_end_by_themselves() -> None:
    """Their memory is given back, and a rank that does wait gets the tensor, whatever the others do with theirs."""
    rank, over = dist.get_rank(), []
    for step in range(3):
        values = np.arange(24.0).reshape(4, 6) + step
        mine = values[2 * rank : 2 * rank + 2].copy()  # which lives as long as any tensor in its memory
        over.append(threading.Event())
        weakref.finalize(mine, over[-1].set)
        pending = shardwise.from_local(torch.from_numpy(mine)).redistribute(1, async_op=True, max_bytes=16)
        if step == 1 and rank == 0:
            assert torch.equal(pending.wait().local_tensor(), torch.from_numpy(values[:, :3]))
        del mine, pending
    assert all(event.wait(PATIENT) for event in over)
    assert torch.equal(shard_tensor(PLAIN, chunks(0, 0, 1)).full_tensor(), PLAIN)


@ranks(4)
def test_equal_layouts_and_renamed_ranks() -> None:
    """A new tensor is new memory; with relabelling, what can stay stays."""
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1, 2, 3))
    same = tensor.redistribute(chunks(0, 0, 1, 2, 3))
    same.fill_(0)
    assert holds(tensor, PLAIN)
    turned = tensor.redistribute(chunks(0, 3, 2, 1, 0), relabel=True)
    assert turned._layout == tensor._layout
    assert turned.sharding_spec() == chunks(0, 0, 1, 2, 3)
    assert holds(turned, PLAIN)


@ranks(4)
def test_copy_between_layouts() -> None:
    """With another dtype, in place, on every pair of layouts."""
    for one, other in itertools.product(SPECS.values(), SPECS.values()):
        source, into = shard_tensor(PLAIN, one), shardwise.zeros(other, *SIZE, dtype=torch.float64)
        pointers = [local.data_ptr() for local in into._local_tensors()]
        into.copy_(source)
        assert holds(into, PLAIN.double())
        assert [local.data_ptr() for local in into._local_tensors()] == pointers


@ranks(4)
def test_to_another_dtype_or_device() -> None:
    """Shards stay where they are; placements on every rank name the new device; nothing changes, nothing is copied."""
    tensor = shard_tensor(PLAIN, SPECS["uneven, several per rank"]).requires_grad_()
    assert tensor.to(torch.float32) is tensor is tensor.cpu() is tensor.to("cpu")
    double = tensor.to(torch.float64)
    assert double.dtype is torch.float64
    assert holds(double, PLAIN.double())
    assert double._layout is tensor._layout
    assert double.requires_grad
    assert tensor.to(double).dtype is torch.float64
    assert holds(tensor.to(torch.float32, copy=True), PLAIN)
    meta = tensor.to("meta")
    assert meta.is_meta
    assert {str(s.placement.device()) for s in meta.metadata().shards_metadata} == {"meta"}
    assert meta.sharding_spec().layout(SIZE) == meta._layout
    assert [s.placement.rank() for s in meta.metadata().shards_metadata] == [
        s.placement.rank() for s in tensor.metadata().shards_metadata
    ]
    with pytest.raises(RuntimeError, match="contiguous_format"):
        tensor.cpu(memory_format=torch.channels_last)


@ranks(4)
def test_a_tensor_sharded_by_columns_is_whole_when_it_is_gathered() -> None:
    """Which the old system's full state dict got wrong."""
    tensor = shard_tensor(PLAIN, chunks(1, 0, 1, 2, 3))
    assert torch.equal(tensor.full_tensor(), PLAIN)
    assert torch.equal(whole(tensor), PLAIN)
