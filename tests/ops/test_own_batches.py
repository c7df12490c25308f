"""The old rule, within `own_batches`: a plain batch is each rank's own. Compared with plain weights and all batches."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, CUTS, SIZE, boxes, chunks, holds, places
from tests.ops.tables import BAGS, BATCHES, OPTIONS, ROWS, WIDTH, close, mine, own, seeds, sent, shards_close, table
from torch.nn import functional

import shardwise
from shardwise import ReplicatedShardingSpec
from shardwise.errors import ProcessGroupError
from shardwise.ops.embedding import ops as embedding_ops
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

assert embedding_ops  # which registers the ops


@pytest.mark.parametrize("spec", CUTS)
@ranks(4)
@own
def test_embedding_is_that_of_all_batches_in_a_plain_table(spec: str) -> None:
    """Result, gradient and the table itself, for every option, wherever the rows and columns lie."""
    sizes = [len(batch) for batch in BATCHES]
    for options in OPTIONS.values():
        plain = table().requires_grad_()
        expected = functional.embedding(torch.cat(BATCHES), plain, **options)
        factors = seeds(*expected.shape)
        (expected * factors).sum().backward()
        weight = shard_tensor(table(), ALL[spec]).requires_grad_()
        result = functional.embedding(BATCHES[dist.get_rank()], weight, **options)
        close(result, mine(expected, sizes))
        assert result.requires_grad
        (result * mine(factors, sizes)).sum().backward()
        assert plain.grad is not None
        shards_close(weight, plain)
        shards_close(weight.grad, plain.grad)
        assert weight.grad is not None


@pytest.mark.parametrize("spec", CUTS)
@ranks(4)
@own
def test_embedding_bag_is_that_of_all_batches_in_a_plain_table(spec: str) -> None:
    """Each mode and option; bags of several lengths and none; the weights of samples get gradients too."""
    sizes, numbers = [len(batch) for batch in BATCHES], [len(bags) for bags in BAGS]
    starts = torch.tensor([0, *sizes[:-1]]).cumsum(0)
    offsets = torch.cat([bags + start for bags, start in zip(BAGS, starts, strict=True)])
    samples = torch.rand(sum(sizes), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    modes = [("sum", False), ("sum", True), ("mean", False), ("max", False)]
    for mode, weighted in modes:
        for kind in ("plain", "padding", "max_norm", "scale_grad_by_freq"):
            options = OPTIONS[kind]
            if mode == "max" and kind == "scale_grad_by_freq":
                continue
            plain, plain_samples = table().requires_grad_(), samples.clone().requires_grad_()
            chosen: dict[str, Any] = {"mode": mode, **options}
            unscaled = {**chosen, "scale_grad_by_freq": False}  # torch 2.13 would divide by the counts of other rows
            expected = functional.embedding_bag(
                torch.cat(BATCHES), plain, offsets, **unscaled, per_sample_weights=plain_samples if weighted else None
            )
            factors = seeds(*expected.shape)
            (expected * factors).sum().backward()
            assert plain.grad is not None
            if "scale_grad_by_freq" in options:
                plain.grad /= torch.cat(BATCHES).bincount(minlength=ROWS)[:, None]
            weight = shard_tensor(table(), ALL[spec]).requires_grad_()
            own = mine(samples, sizes).clone().requires_grad_()
            here = dist.get_rank()
            result = functional.embedding_bag(
                BATCHES[here], weight, BAGS[here], **chosen, per_sample_weights=own if weighted else None
            )
            close(result, mine(expected, numbers))
            (result * mine(factors, numbers)).sum().backward()
            shards_close(weight, plain)
            shards_close(weight.grad, plain.grad)
            if weighted:
                assert plain_samples.grad is not None
                assert own.grad is not None
                close(own.grad, mine(plain_samples.grad, sizes))


def cut(begin: list[int], size: list[int], dice: random.Random) -> list[tuple[list[int], list[int], int]]:
    """A box cut in two again and again, at any place in any dim, each part on any rank."""
    dim = dice.randrange(2)
    if dice.random() < 0.25 or not size[dim]:
        return [(begin, size, dice.randrange(4))]
    at = dice.randint(0, size[dim])
    low, high, rest = list(size), list(size), list(begin)
    low[dim], high[dim], rest[dim] = at, size[dim] - at, begin[dim] + at
    return cut(begin, low, dice) + cut(rest, high, dice)


@ranks(4)
@own
def test_embedding_in_random_layouts() -> None:
    """Boxes that overlap in rows or columns, or are empty, many on a rank or none."""
    for seed in range(12):
        dice = random.Random(seed)
        weight = shard_tensor(table(), boxes(*cut([0, 0], list(SIZE), dice))).requires_grad_()
        batches = [torch.tensor([dice.randrange(ROWS) for _ in range(dice.randrange(9))]).long() for _ in range(4)]
        plain = table().requires_grad_()
        expected = functional.embedding(torch.cat(batches), plain, max_norm=1.4, scale_grad_by_freq=True)
        factors = seeds(*expected.shape)
        (expected * factors).sum().backward()
        result = functional.embedding(batches[dist.get_rank()], weight, max_norm=1.4, scale_grad_by_freq=True)
        sizes = [len(batch) for batch in batches]
        close(result, mine(expected, sizes))
        (result * mine(factors, sizes)).sum().backward()
        assert plain.grad is not None
        shards_close(weight, plain)
        shards_close(weight.grad, plain.grad)


@pytest.mark.parametrize("spec", ["chunk dim 0", "chunk dim -1", "uneven, several per rank", "replicated"])
@ranks(4)
@own
def test_sparse_gradients(spec: str) -> None:
    """Each shard's gradient holds the rows that were looked up, without the padding's."""
    here = dist.get_rank()
    ids = torch.cat(BATCHES)
    for op in (functional.embedding, functional.embedding_bag):
        more: Any = [{}] * 4 if op is functional.embedding else [{"offsets": bags} for bags in BAGS]
        dense, sparse = (shard_tensor(table(), ALL[spec]).requires_grad_() for _ in range(2))
        for weight, kind in ((dense, False), (sparse, True)):
            op(BATCHES[here], weight, padding_idx=3, sparse=kind, **more[here]).sum().backward()
        for one, other in zip(sparse.local_shards(), dense.local_shards(), strict=True):
            assert one.tensor.grad is not None
            assert other.tensor.grad is not None
            assert one.tensor.grad.is_sparse
            close(one.tensor.grad.to_dense(), other.tensor.grad)
            first, length = one.metadata.shard_offsets[0], one.metadata.shard_sizes[0]
            looked_up = ids[(ids != 3) & (ids >= first) & (ids < first + length)] - first
            if one.tensor.numel():
                assert torch.equal(one.tensor.grad.coalesce().indices()[0], looked_up.unique())


@ranks(4)
@own
def test_forms_of_bags() -> None:
    """Bags of one length as a matrix, and offsets with the end of the last bag."""
    weight = shard_tensor(table(), chunks(0, 0, 1, 2, 3)).requires_grad_()
    here = dist.get_rank()
    matrix = torch.tensor([[6, 1, 1], [0, 3, 2]])[: here % 3]
    close(functional.embedding_bag(matrix, weight), functional.embedding_bag(matrix, table()))
    ends = torch.cat([BAGS[here], torch.tensor([len(BATCHES[here])])])
    for offsets in (ends, ends.int()):
        result = functional.embedding_bag(BATCHES[here], weight, offsets, include_last_offset=True, mode="sum")
        close(result, functional.embedding_bag(BATCHES[here], table(), BAGS[here], mode="sum"))


@ranks(4)
@own
def test_ids_of_any_shape_and_kind() -> None:
    """Several dims, none, 32 bits; and torch's functions below those of nn."""
    weight = shard_tensor(table(), chunks(1, 3, 1)).requires_grad_()
    here = dist.get_rank()
    for ids in (torch.tensor(here), torch.tensor([[here, 6], [0, 0]]).int(), torch.zeros(2, 0, 3, dtype=torch.int64)):
        result = functional.embedding(ids, weight)
        assert result.shape == (*ids.shape, WIDTH)
        close(result, functional.embedding(ids, table()))
        close(torch.embedding(weight, ids), result)
    for mode in range(3):
        arguments = (BATCHES[here], BAGS[here], False, mode, False, None, False, 3)
        for actual, expected in zip(
            torch.embedding_bag(weight, *arguments), torch.embedding_bag(table(), *arguments), strict=True
        ):
            close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@ranks(2)
@own
def test_tables_of_any_precision(dtype: torch.dtype) -> None:
    """The rows are the table's, bit by bit; so are gradients whose sums are exact."""
    plain = table().to(dtype)
    for spec in (chunks(0, 0, 1), chunks(1, 1, 0)):
        weight = shard_tensor(plain, spec).requires_grad_()
        ids = torch.tensor([1, 6, 6, 0][: 3 + dist.get_rank()])
        result = functional.embedding(ids, weight)
        assert torch.equal(result, plain[ids])
        result.sum().backward()
        assert weight.grad is not None
        expected = torch.tensor([1, 2, 0, 0, 0, 0, 4], dtype=dtype)[:, None].expand(SIZE)
        assert holds(weight.grad, expected)
    integers = shard_tensor(torch.arange(42).reshape(SIZE), chunks(0, 1, 0))
    assert torch.equal(functional.embedding(ids, integers), torch.arange(42).reshape(SIZE)[ids])


@ranks(4)
@own
def test_sub_groups_and_outsiders() -> None:
    """Only the ranks of the table's group call; another one is told so."""
    group = dist.new_group([1, 3])
    for spec in (chunks(0, 3, 1), chunks(1, 1, 3), ReplicatedShardingSpec(["rank:3/cpu"])):
        weight = shard_tensor(table(), spec, process_group=group).requires_grad_()
        ids = torch.tensor([4, 0, 4])
        if dist.get_rank() in (0, 2):
            with pytest.raises(ProcessGroupError, match="not in the process group"):
                functional.embedding(ids, weight)
            continue
        result = functional.embedding(ids, weight)
        close(result, table()[ids])
        result.sum().backward()
        expected = torch.zeros(SIZE, dtype=torch.float64)
        expected[4], expected[0] = 4, 2
        shards_close(weight.grad, expected)


@ranks(4)
@own
def test_the_gradient_goes_on_through_what_made_the_table() -> None:
    """A table that was moved there, on few ranks or replicated, hands its gradient on to where it came from."""
    for spec in (chunks(0, 2), boxes(([0, 0], [7, 2], 3), ([0, 2], [7, 4], 1)), ALL["replicated"]):
        weight = shard_tensor(table(), chunks(0, 0, 1, 2, 3)).requires_grad_()
        functional.embedding(BATCHES[dist.get_rank()], weight.redistribute(spec)).sum().backward()
        expected = torch.zeros(ROWS, dtype=torch.float64).index_add_(0, torch.cat(BATCHES), torch.ones(16).double())
        shards_close(weight.grad, expected[:, None].expand(SIZE))


@ranks(2)
@own
def test_gradients_add_up_over_calls_and_in_a_second_derivative() -> None:
    """Twice in one loss is twice the gradient; the gradients of all ranks' losses are added up again."""
    weight = shard_tensor(table(), chunks(0, 0, 1)).requires_grad_()
    ids = torch.tensor([1, 6])
    (functional.embedding(ids, weight) + functional.embedding(ids, weight)).sum().backward()
    expected = torch.zeros(SIZE, dtype=torch.float64)
    expected[1] = expected[6] = 4
    shards_close(weight.grad, expected)
    result = functional.embedding(ids, weight)
    local = weight.local_tensor()
    (grad,) = torch.autograd.grad((result**2).sum(), [local], create_graph=True)
    weight.grad = None
    grad.sum().backward()
    shards_close(weight.grad, expected)  # of two ranks, each of which has the square's 2


@ranks(2)
@own
def test_without_a_graph() -> None:
    """Nothing is recorded for a frozen table or without grad, and max_norm still shortens its rows."""
    for spec in (chunks(0, 0), chunks(1, 0, 1), ReplicatedShardingSpec(["rank:0/cpu", "rank:1/cpu"])):
        frozen, weight = shard_tensor(table(), spec), shard_tensor(table(), spec).requires_grad_()
        assert not functional.embedding(BATCHES[0], frozen).requires_grad
        with torch.no_grad(), shardwise.validation(False):
            assert not functional.embedding(BATCHES[0], weight).requires_grad
            ids = torch.tensor([[0], [5]])[dist.get_rank()]
            plain = table()
            functional.embedding(torch.tensor([0, 5]), plain, max_norm=0.1)
            close(functional.embedding(ids, weight, max_norm=0.1), plain[ids])
        shards_close(weight, plain)


@ranks(4)
@own
def test_tables_without_rows_or_columns() -> None:
    """Nothing to look up in, or nothing to find."""
    for size in ((0, 6), (7, 0), (0, 0)):
        weight = shard_tensor(torch.zeros(size), chunks(0, 0, 1, 2, 3)).requires_grad_()
        ids = torch.zeros(dist.get_rank() if size[0] else 0, dtype=torch.int64)
        result = functional.embedding(ids, weight)
        assert result.shape == (len(ids), size[1])
        result.sum().backward()


@ranks(4)
@own
def test_only_distinct_ids_and_their_rows_travel() -> None:
    """By rows an id goes to one rank, by columns to all that hold any; in a replicated table none goes anywhere."""
    ids = torch.tensor([0, 0, 2, 6, 6, 6])  # three distinct ones: of rank 0, 1 and 3 if rows are cut
    for dim, told in {0: [1, 1, 0, 1], 1: [3, 3, 3, 0]}.items():
        weight = shard_tensor(table(), chunks(dim, 0, 1, 2, 3))
        _, to_holders, back = sent(ids, weight)
        assert to_holders == [8 * count for count in told]
        assert back == [8 * told[dist.get_rank()] * weight.local_tensor().shape[1]] * 4
    assert not sent(ids, shard_tensor(table(), ReplicatedShardingSpec(places(0, 1, 2, 3))))


@ranks(4)
@own
def test_few_repeated_ids_are_left_as_they_are() -> None:
    """They travel as often as they occur, with the same result, gradients and shortened rows."""
    ids = torch.tensor([[3, 6, 0, 5], [1, 3, 2, 4]])
    plain = table().requires_grad_()
    functional.embedding(ids, plain, padding_idx=5, max_norm=1.4).square().sum().backward()
    for sparse in (False, True):
        weight = shard_tensor(table(), chunks(1, 0, 1, 2)).requires_grad_()
        result = functional.embedding(ids, weight, padding_idx=5, max_norm=1.4, sparse=sparse)
        close(result, plain[ids])
        result.square().sum().backward()
        assert plain.grad is not None
        shards_close(weight.grad, plain.grad * 4)
        shards_close(weight, plain)
    assert sent(ids, weight)[1] == [8 * 8, 8 * 8, 8 * 8, 0]
