"""Ids that are one value, plain or sharded, in a sharded table: compared with a plain table, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, CUTS, SIZE, assert_close, assert_holds, boxes, chunks, places
from tests.comm.disagreement.given import impatient
from tests.ops.tables import BAGS, BATCHES, OPTIONS, sent, shards_close, table, ways
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import shardwise
from shardwise import ReplicatedShardingSpec, ShardedTensor, from_local
from shardwise.errors import ProcessGroupError, PropertyError, RankMismatchError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

IDS = torch.cat(BATCHES)  # 16 of them, on rank 1 none
SHAPES = ((16,), (2, 8), (1, 16), (4, 2, 2))


def factors(size: torch.Size) -> torch.Tensor:
    """What results are multiplied with, so that each entry's gradient is another."""
    return torch.rand(size, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def assert_same(found: Any, expected: torch.Tensor, weight: ShardedTensor, plain: torch.Tensor) -> None:
    """The result, the table's gradient and the table itself, after the backward of a weighted sum."""
    assert isinstance(found, ShardedTensor)
    assert found.shape == expected.shape
    assert found.requires_grad
    assert_holds(found, expected)
    for result in (found, expected):
        (result * factors(expected.shape)).sum().backward()
    assert plain.grad is not None
    assert weight.grad is not None
    shards_close(weight, plain)
    shards_close(weight.grad, plain.grad)


@pytest.mark.parametrize("spec", CUTS)
@ranks(4)
def test_plain_ids_are_the_same_on_every_rank(spec: str) -> None:
    """The result is one tensor and the gradient that of one loss, for every option and every kind of table."""
    for k, options in enumerate(OPTIONS.values()):
        for way in ways(options):
            plain, ids = table().requires_grad_(), IDS.view(SHAPES[k % len(SHAPES)])
            weight = shard_tensor(table(), ALL[spec]).requires_grad_()
            with way:
                found = functional.embedding(ids, weight, **options)
            assert_same(found, functional.embedding(ids, plain, **options), weight, plain)


@pytest.mark.parametrize("spec", CUTS)
@ranks(4)
def test_a_batch_of_all_ranks(spec: str) -> None:
    """Each rank's own ids, joined: the rows come to the ids, wherever the table lies."""
    for options in OPTIONS.values():
        for way in ways(options):
            plain, weight = table().requires_grad_(), shard_tensor(table(), ALL[spec]).requires_grad_()
            ids = from_local(BATCHES[dist.get_rank()])
            with way:
                found = functional.embedding(ids, weight, **options)
            assert found._layout.elements_by_rank() == {r: 6 * len(b) for r, b in enumerate(BATCHES)}
            assert_same(found, functional.embedding(IDS, plain, **options), weight, plain)


@pytest.mark.parametrize("spec", CUTS)
@ranks(4)
def test_ids_in_any_layout(spec: str) -> None:
    """Several boxes of ids on a rank, none, replicas: the result lies as the ids do, with whole rows."""
    ids = torch.arange(42).reshape(SIZE) % 7
    for options, way in [(one, way) for one in ({}, OPTIONS["scale_grad_by_freq"]) for way in ways(one)]:
        plain, weight = table().requires_grad_(), shard_tensor(table(), chunks(0, 0, 1, 2, 3)).requires_grad_()
        with way:
            found = functional.embedding(shard_tensor(ids, ALL[spec]), weight, **options)
        assert found._layout.boxes.sizes[:, :2].tolist() == shard_tensor(ids, ALL[spec])._layout.boxes.sizes.tolist()
        assert_same(found, functional.embedding(ids, plain, **options), weight, plain)


@ranks(4)
def test_position_tables_get_the_gradient_of_one_loss() -> None:
    """A table that a model indexes with its own `arange`, beside ids of a batch: as in GPT-2, BERT and CLIP."""
    ids = torch.arange(24).reshape(4, 6) % 7
    words, places_ = nn.Embedding(*SIZE, dtype=torch.float64), nn.Embedding(9, 6, dtype=torch.float64)
    for module in (words, places_):
        dist.broadcast(module.weight.data, 0)

    def loss_of(words: Any, places_: Any, ids: Any) -> Any:
        return ((words(ids) + places_(torch.arange(6)[None])) ** 2).sum()

    loss_of(words, places_, ids).backward()
    for spec in (chunks(0, 0, 1, 2, 3), chunks(1, 0, 1, 2, 3), chunks(0, 2, 1)):
        for batch in (ids, from_local(ids[dist.get_rank()][None])):
            twins = nn.Embedding(*SIZE, dtype=torch.float64), nn.Embedding(9, 6, dtype=torch.float64)
            for twin, module in zip(twins, (words, places_), strict=True):
                twin.weight = nn.Parameter(shard_tensor(module.weight.detach(), spec))
            loss_of(*twins, batch).backward()
            for twin, module in zip(twins, (words, places_), strict=True):
                shards_close(twin.weight.grad, module.weight.grad)


@ranks(4)
def test_columns_need_nobody_else_for_plain_ids() -> None:
    """A table cut along its columns is looked up where it lies, and the result is cut as the table is."""
    weight = shard_tensor(table(), chunks(1, 0, 1, 2, 3))
    assert sent(IDS, weight) == []
    found = functional.embedding(IDS, weight)
    assert found._layout.boxes.sizes.tolist() == [[16, 2], [16, 2], [16, 2]]


@ranks(4)
def test_each_plain_id_travels_once() -> None:
    """Of plain ids every rank looks up a quarter, in a table cut along its rows, if rows are exchanged."""
    weight = shard_tensor(table(), chunks(0, 0, 1, 2, 3))
    here = dist.get_rank()
    mine = IDS[4 * here : 4 * here + 4].unique()
    _, to_holders, _ = sent(IDS, weight)
    assert to_holders == [8 * int(((mine >= 2 * k) & (mine < 2 * k + 2)).sum()) for k in range(4)]


BAG_OPTIONS = [  # mode, whether samples are weighted, what else
    ("sum", False, "max_norm"),
    ("sum", True, "padding"),
    ("sum", True, "max_norm"),
    ("mean", False, "plain"),
    ("mean", False, "padding"),
    ("max", False, "padding"),
    ("max", False, "max_norm"),
]


BAG_TABLES = ["chunk dim 0", "chunk dim -1", "uneven, several per rank", "all on one rank", "replicated"]
BAG_IDS = [(kind, spec) for kind in ("plain", "own", "cut bags") for spec in BAG_TABLES]
# Offsets that all ranks have are read before any row is looked up: whatever the table is.
BAG_IDS += [(kind, spec) for kind in ("offsets everywhere", "own, offsets everywhere") for spec in BAG_TABLES[1:3]]


@pytest.mark.parametrize(("kind", "spec"), BAG_IDS)
@ranks(4)
def test_bags_of_flat_ids(kind: str, spec: str) -> None:
    """However ids and offsets are given: dealt out, where they lie, or redistributed if a bag is cut."""
    here, sizes = dist.get_rank(), [len(batch) for batch in BATCHES]
    starts = torch.tensor([0, *sizes[:-1]]).cumsum(0)
    offsets = torch.cat([bags + start for bags, start in zip(BAGS, starts, strict=True)])
    samples = torch.rand(16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for mode, weighted, name in BAG_OPTIONS:
        options: dict[str, Any] = {"mode": mode, **OPTIONS[name]}
        plain, weights = table().requires_grad_(), samples.clone().requires_grad_()
        expected = functional.embedding_bag(
            IDS, plain, offsets, **options, per_sample_weights=weights if weighted else None
        )
        twin, leaf = shard_tensor(table(), ALL[spec]).requires_grad_(), samples.clone().requires_grad_()
        own, given = leaf.split(sizes)[here].detach().requires_grad_(), leaf
        ids: Any = IDS
        where: Any = offsets
        taken: Any = given
        if kind.startswith("own"):
            ids, taken = from_local(BATCHES[here]), from_local(own)
            where = offsets if kind.endswith("everywhere") else from_local(BAGS[here] + starts[here])
        elif kind == "offsets everywhere":
            where = shard_tensor(offsets, ReplicatedShardingSpec(places(0, 1, 2, 3)))
        elif kind == "cut bags":
            ids = shard_tensor(IDS, chunks(0, 3, 1, 0, 2))
        found = functional.embedding_bag(ids, twin, where, **options, per_sample_weights=taken if weighted else None)
        assert_same(found, expected, twin, plain)
        if weighted and kind.startswith("own"):
            assert_close(own.grad, weights.grad.split(sizes)[here])
        elif weighted:
            assert_close(given.grad, weights.grad)


@pytest.mark.parametrize("spec", ["chunk dim 0", "chunk dim -1", "uneven, several per rank"])
@ranks(4)
def test_bags_that_are_rows(spec: str) -> None:
    """A matrix of ids, plain, joined, cut along its rows or its columns, on few ranks; frequencies count once."""
    matrix = IDS[:15].reshape(5, 3)
    parts = matrix.split([1, 0, 3, 1])
    layouts = [chunks(0, 3, 1), chunks(1, 0, 1, 2), boxes(([0, 0], [5, 3], 2)), ReplicatedShardingSpec(places(1, 2))]
    for options in ({"mode": "sum"}, {"mode": "mean", "padding_idx": 3}, {"mode": "max", "max_norm": 1.2}):
        for ids in (matrix, from_local(parts[dist.get_rank()]), *(shard_tensor(matrix, one) for one in layouts)):
            plain, weight = table().requires_grad_(), shard_tensor(table(), ALL[spec]).requires_grad_()
            expected = functional.embedding_bag(matrix, plain, **options)
            assert_same(functional.embedding_bag(ids, weight, **options), expected, weight, plain)
    samples = torch.rand(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    for one in (samples, shard_tensor(samples, chunks(1, 2, 0)), shard_tensor(samples, layouts[2])):
        plain, weight = table().requires_grad_(), shard_tensor(table(), ALL[spec]).requires_grad_()
        expected = functional.embedding_bag(matrix, plain, mode="sum", per_sample_weights=samples)
        found = functional.embedding_bag(shard_tensor(matrix, layouts[0]), weight, mode="sum", per_sample_weights=one)
        assert_same(found, expected, weight, plain)


@ranks(4)
def test_include_last_offset_and_short_integers() -> None:
    """Offsets that end with the end of all, of 32 bits, in a table cut along its rows."""
    weight, ends = shard_tensor(table(), chunks(0, 0, 1, 2, 3)), torch.tensor([0, 3, 3, 9, 16])
    expected = functional.embedding_bag(IDS, table(), ends, include_last_offset=True)
    for kind in (torch.int64, torch.int32):
        found = functional.embedding_bag(IDS.to(kind), weight, ends.to(kind), include_last_offset=True)
        assert_close(found.full_tensor(), expected)
    own = from_local(BATCHES[dist.get_rank()], sizes=[len(batch) for batch in BATCHES])
    offsets = torch.tensor([0, 3, 5, 14, 16])
    found = functional.embedding_bag(own, weight, offsets, include_last_offset=True)
    expected = functional.embedding_bag(IDS, table(), offsets, include_last_offset=True)
    assert_close(found.full_tensor(), expected)
    assert found._layout.elements_by_rank() == {0: 12, 1: 0, 2: 6, 3: 6}


@ranks(2)
def test_ids_of_one_number_and_of_none() -> None:
    """A number is looked up by every rank; of no ids there is nothing to find."""
    for spec in (chunks(0, 0, 1), chunks(1, 1, 0)):
        plain, weight = table().requires_grad_(), shard_tensor(table(), spec).requires_grad_()
        assert_same(
            functional.embedding(torch.tensor(5), weight), functional.embedding(torch.tensor(5), plain), weight, plain
        )
        assert torch.embedding(weight, torch.zeros(2, 0, 3, dtype=torch.int64)).shape == (2, 0, 3, 6)
        meta = shardwise.empty(spec, 7, 6, dtype=torch.float64).to("meta")
        assert functional.embedding(torch.zeros(3, 2, dtype=torch.int64, device="meta"), meta).shape == (3, 2, 6)


@pytest.mark.parametrize("count", [16, 15, None])
@ranks(4)
def test_bags_that_are_cut_are_not_gathered(count: int | None) -> None:
    """Ids and weights move to the ranks of their bags: few bags and many, empty ones, an id that is in no bag."""
    samples = torch.rand(16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    ends = [] if count is None else [count]
    for begins in ([0], [0, 3], [0, 0, 5, 5, 9, 14, 14], [0, 1, 2, 3, 4, 5, 6, 7, 8, 15]):
        plain, weights = table().requires_grad_(), samples.clone().requires_grad_()
        expected = functional.embedding_bag(
            IDS[:count], plain, torch.tensor(begins), per_sample_weights=weights[:count], mode="sum"
        )
        expected.square().sum().backward()
        offsets = torch.tensor(begins + ends)
        cuts = chunks(0, 1, 0, 3, 2), chunks(0, 2), boxes(([0], [7], 3), ([7], [2], 0), ([9], [7], 3))
        for ids, where in (
            *((shard_tensor(IDS, cut), offsets) for cut in cuts),
            *((shard_tensor(IDS, cut), shard_tensor(offsets, cuts[0])) for cut in cuts),
            (IDS, shard_tensor(offsets, cuts[1])),
            (IDS, offsets),
        ):
            twin = shard_tensor(table(), ALL["uneven, several per rank"]).requires_grad_()
            given = shard_tensor(samples, cuts[2]).requires_grad_()
            with shardwise.gather_budget(0):
                found = functional.embedding_bag(
                    ids, twin, where, per_sample_weights=given, mode="sum", include_last_offset=bool(ends)
                )
            assert_close(found.full_tensor(), expected)
            found.square().sum().backward()
            shards_close(twin.grad, plain.grad)
            shards_close(given.grad, weights.grad)


@ranks(2)
def test_offsets_of_bags_that_are_cut_are_checked() -> None:
    """Every rank raises where they fall, begin late or end too late."""
    weight, ids = shard_tensor(table(), chunks(0, 0, 1)), shard_tensor(IDS, chunks(0, 1, 0))
    for offsets in (torch.tensor([0, 3, 9, 5]), torch.tensor([0, 17])):
        for where in (offsets, shard_tensor(offsets, chunks(0, 1, 0))):
            with pytest.raises(PropertyError, match="offsets of bags must not fall, and end within the 16 ids"):
                functional.embedding_bag(ids, weight, where, include_last_offset=True)
    for where in (torch.tensor([1, 5]), shard_tensor(torch.tensor([1, 5]), chunks(0, 0, 1))):
        with pytest.raises(RuntimeError, match="offsets"):
            functional.embedding_bag(ids, weight, where)
    for given, where in ((ids, None), (shard_tensor(IDS.view(4, 4), chunks(0, 0, 1)), ids)):
        with pytest.raises(ValueError, match="offsets"):
            functional.embedding_bag(given, weight, where)


@ranks(2)
def test_below_functional_bags_are_gathered() -> None:
    """`torch.embedding_bag`, with all that it gives, as of whole tables within the budget."""
    weight, offsets = shard_tensor(table(), chunks(0, 0, 1)), torch.tensor([0, 3, 9])
    found = torch.embedding_bag(weight, IDS, offsets, mode=2)
    for one, other in zip(found, torch.embedding_bag(table(), IDS, offsets, mode=2), strict=True):
        assert_close(one.full_tensor(), other)


@ranks(2)
def test_ranks_that_do_not_have_the_same_ids_are_told() -> None:
    """An own batch passed as it is, of another size or of other values: every rank raises, before anything moves."""
    weight, here = shard_tensor(table(), chunks(0, 0, 1)), dist.get_rank()
    for ids in (torch.arange(3 + here), torch.tensor([1, 2, here])):
        with impatient(), pytest.raises(RankMismatchError, match=r"argument 'input' is a plain tensor.*from_local"):
            functional.embedding(ids, weight)
    with pytest.raises(PropertyError, match="id 7 in a table of 7"):
        functional.embedding(torch.tensor([0, 7]), weight)
    group = dist.new_group([0, 1])
    with pytest.raises(ProcessGroupError, match="same ProcessGroup"):
        functional.embedding(from_local(torch.tensor([1]), process_group=group), weight)
    with pytest.raises(ValueError, match="offsets has to be"):
        functional.embedding_bag(IDS, weight)
    assert_close(functional.embedding(torch.tensor([6]), weight).full_tensor(), table()[[6]])


@ranks(4)
def test_frequencies_in_tables_with_replicas() -> None:
    """Rows cut in two, each half on two ranks: a leaf, and the result of an op; ids that one rank has, or all."""
    ids = torch.tensor([6, 0, 3, 3, 2, 6, 6, 1])
    for given in (ids, torch.tensor(3), from_local(ids.split(2)[dist.get_rank()])):
        plain = table().requires_grad_()
        flat = torch.tensor(3) if not given.ndim else ids
        functional.embedding(flat, plain, scale_grad_by_freq=True).square().sum().backward()
        for is_leaf in (True, False):
            parts = table().split([4, 3])[dist.get_rank() // 2].clone()
            weight = from_local(parts, (0, None), mesh=init_device_mesh("cpu", (2, 2))).detach().requires_grad_()
            used = weight if is_leaf else weight * 1
            functional.embedding(given, used, scale_grad_by_freq=True).square().sum().backward()
            shards_close(weight.grad, plain.grad)


@ranks(2)
def test_offsets_as_torch_wants_them() -> None:
    """Ids behind the last offset are in no bag; offsets that do not begin with 0 are refused, on every rank."""
    weight, rows = shard_tensor(table(), chunks(0, 0, 1)), chunks(0, 0, 1)
    ids = torch.tensor([1, 2, 3, 4, 5, 6, 0, 1])
    offsets = torch.tensor([0, 4, 6])
    expected = functional.embedding_bag(
        ids[:6], table(), offsets, include_last_offset=True, mode="sum"
    )  # as in float32
    for given in (ids, shard_tensor(ids, rows)):
        found = functional.embedding_bag(given, weight, offsets, include_last_offset=True, mode="sum")
        assert_close(found.full_tensor(), expected)
        with pytest.raises(RuntimeError, match="offsets"):
            functional.embedding_bag(given, weight, torch.tensor([1, 5]))
    one = shard_tensor(table(), chunks(1, 0))  # whose columns are all on one rank
    with pytest.raises(PropertyError, match="id 9 in a table of 7"):
        functional.embedding(torch.tensor([9]), one)
