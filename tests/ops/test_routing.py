"""What routers of experts do, with nothing gathered: choosing, counting, masking, reading and writing at indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import chunks
from tests.ops.twin import COLUMNS, ROWS, TWO, Layouts, along, assert_same, normal, plain
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

import shardwise
from shardwise import ShardedTensor
from shardwise.errors import UnsupportedOpError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

TOKENS, EXPERTS, HIDDEN = 8, 4, 6
LOGITS, STATES = normal(TOKENS, EXPERTS), normal(TOKENS, HIDDEN, seed=1)
ROUTES = LOGITS.topk(2).indices
AT = torch.tensor([3, 2, 1, 0])  # tokens
TWICE = torch.tensor([3, 3, 1, 0])

OF_LOGITS: dict[str, Callable[[Any], Any]] = {
    "topk": lambda x: x.softmax(-1).topk(2, -1),
    "sort": lambda x: x.sort(-1, descending=True),
    "argsort along tokens": lambda x: x.argsort(0),
    "best groups of experts": lambda x: x.reshape(TOKENS, 2, 2).topk(1, -1)[0].sum(-1),
    "scattered ones": lambda x: torch.zeros_like(x).scatter_(1, x.topk(2)[1], 1),
    "scattered scores": lambda x: torch.zeros_like(x).scatter(1, x.topk(2)[1], x.topk(2)[0]),
    "nonzero": lambda x: (x > 0).nonzero(),
    "where": lambda x: torch.where(x > 0),
    "tokens and their experts": lambda x: x[torch.tensor([1, 2, -1]), torch.tensor([0, -1, 3]), None],
    "searchsorted": lambda x: torch.searchsorted(torch.tensor([-1.0, 0.0, 1.0]).double(), x),
    "searched for in sorted rows": lambda x: torch.searchsorted(x.sort(-1).values.detach(), normal(TOKENS, 3)),
    "counted in bins": lambda x: (torch.histc(x.detach(), 5), torch.histc(x.detach(), 4, -1, 2)),
    "masked_select": lambda x: x.masked_select(x > 0),
    "running sum": lambda x: (x.cumsum(0), x.cumsum(1), x[:, 0].cumsum(0)),
}
OF_IDS: dict[str, Callable[[Any], Any]] = {
    "one_hot": lambda ids: F.one_hot(ids, EXPERTS).permute(2, 1, 0),
    "experts that are hit": lambda ids: (F.one_hot(ids, EXPERTS + 1).sum((0, 1)) > 0).nonzero(),
    "bincount": lambda ids: (torch.bincount(ids.flatten(), minlength=9), torch.bincount(ids.flatten())),
    "running sum": lambda ids: ids.flatten().cumsum(0),
}
OF_STATES: dict[str, Callable[..., Any]] = {
    "rows": lambda x, y: x[TWICE],
    "rows, sharded index": lambda x, y: x[shard_tensor(TWICE, ROWS(TWICE.shape))],
    "rows by a plain mask": lambda x, y: x[torch.arange(TOKENS) % 3 == 0],
    "rows by a mask of their values": lambda x, y: x[x.sum(1) > 0],
    "elements by a mask": lambda x, y: x[x > 0],
    "index_add": lambda x, y: x.index_add(0, TWICE, y),
    "index_add_ in place": lambda x, y: torch.zeros_like(x).index_add_(0, TWICE, y),
    "index_add, sharded index": lambda x, y: x.index_add(0, shard_tensor(TWICE, ROWS(TWICE.shape)), y),
    "index_put": lambda x, y: x.index_put((AT,), y),
    "index_put, accumulated": lambda x, y: x.index_put((TWICE,), y, accumulate=True),
    "index_put by a mask": lambda x, y: x.index_put((torch.arange(TOKENS) < 4,), y),
    "a number by a mask": lambda x, y: x.index_put((x > 0,), torch.zeros((), dtype=x.dtype)),
    "repeated": lambda x, y: x.repeat_interleave(2, 0),
}


@pytest.mark.parametrize("layout", TWO)
@ranks(2)
def test_choosing_experts(layout: str) -> None:
    """Of scores by tokens, by experts, in uneven boxes: sizes that depend on values are those of the plain tensor."""
    for name, function in OF_LOGITS.items():
        assert_same(function, [(LOGITS, TWO[layout])], name)
    for name, function in OF_IDS.items():
        assert_same(function, [(ROUTES, TWO[layout])], name)


@pytest.mark.parametrize("layout", TWO)
@ranks(2)
def test_reading_and_writing_tokens(layout: str) -> None:
    """Hidden states by tokens, by features, in uneven boxes; what is written plain or sharded."""
    for name, function in OF_STATES.items():
        for values in (plain, TWO[layout]):
            assert_same(function, [(STATES, TWO[layout]), (normal(4, HIDDEN, seed=2), values)], name)


@pytest.mark.parametrize("dim", [0, 1])
@ranks(4)
def test_routing_on_four_ranks(dim: int) -> None:
    """The same on more ranks than some dims have elements."""
    layouts = along(dim, 2, 0, 3, 1)
    for name, function in (*OF_LOGITS.items(), *OF_STATES.items()):
        operands = [(LOGITS if name in OF_LOGITS else STATES, layouts)]
        operands += [] if name in OF_LOGITS else [(normal(4, HIDDEN, seed=2), COLUMNS)]
        assert_same(function, operands, name)


def by_group(x: Any, weight: Any) -> Any:
    """A product for each group of tokens; one group has none. Torch's kernel takes no float64, so the twin loops."""
    ends = torch.tensor([2, 3, 3, 8], dtype=torch.int32)
    if any(isinstance(one, shardwise.ShardedTensor) for one in (x, weight)):
        return torch._grouped_mm(x, weight, offs=ends)
    groups = zip([0, *ends[:-1].tolist()], ends.tolist(), weight, strict=True)
    return torch.cat([x[begin:end] @ one for begin, end, one in groups])


@pytest.mark.parametrize("of_weight", ["plain", "experts", "dim 1", "dim 2", "uneven"])
@ranks(2)
def test_experts_in_one_tensor(of_weight: str) -> None:
    """Three-dimensional weights of experts, cut in any dim: grouped, batched and chosen products."""
    chosen: dict[str, Layouts] = {"plain": plain, "experts": ROWS, "dim 1": COLUMNS, "dim 2": along(2, 0, 1)}
    weight = (normal(EXPERTS, HIDDEN, 10, seed=3), {**chosen, **TWO}[of_weight])
    products: dict[str, Callable[..., Any]] = {
        "grouped": by_group,
        "batched": lambda x, w: torch.bmm(x.expand(EXPERTS, TOKENS, HIDDEN), w),
        "of each token's expert": lambda x, w: torch.bmm(x[:, None], w[ROUTES[:, 0]]),
        "one after another": lambda x, w: sum(x @ w[expert] for expert in range(EXPERTS)),
    }
    for of_x, layouts in {"plain": plain, **TWO}.items():
        if layouts is plain and of_weight == "plain":
            continue
        for name, product in products.items():
            assert_same(product, [(STATES, layouts), weight], f"{name}, tokens {of_x}")


@ranks(2)
def test_sizes_follow_the_values_of_each_call() -> None:
    """The same call with other values gives another size: it is not played back."""
    for count in (3, 5, 0):
        values = (torch.arange(TOKENS) < count).double()
        found = shard_tensor(values, ROWS(values.shape)).nonzero()
        assert found.shape == (count, 1)
        assert found.full_tensor().flatten().tolist() == list(range(count))


@ranks(2)
def test_what_needs_all_of_a_matrix_is_refused_in_one_line() -> None:
    """Its singular values: the error names the op, the operand, the bytes, and what to do."""
    scores = shard_tensor(LOGITS, ROWS(LOGITS.shape))
    with shardwise.gather_budget(0), pytest.raises(UnsupportedOpError) as caught:
        torch.linalg.svdvals(scores)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(
        "aten._linalg_svd.default needs A (8, 4) whole, which would gather 256 bytes on every rank"
    )
    assert "shardwise.gather_budget(256)" in message
    assert message.endswith("not supported for ShardedTensor!")
    with shardwise.gather_budget(256):
        assert torch.allclose(torch.linalg.svdvals(scores).full_tensor(), torch.linalg.svdvals(LOGITS))


@ranks(2)
def test_what_one_rank_would_find_wrong_all_ranks_raise() -> None:
    """A negative number to count in one shard, and a mask of another size."""
    keys = torch.tensor([1, 2, 3, -1])
    with pytest.raises(RuntimeError, match="non-negative"):
        torch.bincount(shard_tensor(keys, ROWS(keys.shape)))
    with pytest.raises(IndexError, match="mask"):
        shard_tensor(STATES, ROWS(STATES.shape))[torch.ones(TOKENS + 1, dtype=torch.bool)]


@ranks(2)
def test_values_as_a_list() -> None:
    """Every rank asks for all numbers, and gets them."""
    assert shard_tensor(ROUTES, ROWS(ROUTES.shape)).tolist() == ROUTES.tolist()


@ranks(2)
def test_odd_operands_of_routers() -> None:
    """One tensor given twice, infinite sums, integers, masks of a wrong size: as on a plain tensor, on every rank."""
    rows = chunks(0, 0, 1)
    assert torch.equal(torch.searchsorted(*[shard_tensor(torch.arange(6.0), rows)] * 2).full_tensor(), torch.arange(6))
    with shardwise.gather_budget(0):
        numbers = torch.arange(6.0)
        sharded = shard_tensor(numbers, rows)
        lines, twin = numbers.reshape(2, 3), shard_tensor(numbers.reshape(2, 3), rows)
        assert torch.equal(torch.searchsorted(twin, twin).full_tensor(), torch.searchsorted(lines, lines))
        endless = torch.tensor([1.0, 2.0, 3.0, float("inf")])
        assert torch.equal(shard_tensor(endless, rows).cumsum(0).full_tensor(), endless.cumsum(0))
        table = torch.arange(12).reshape(4, 3)
        i, j = torch.tensor([0, 3, 1]), torch.tensor([2, -1, 0])
        assert torch.equal(shard_tensor(table, rows)[i, j].full_tensor(), table[i, j])
        index, source = torch.tensor([1, 1, 0, 2, 1]), torch.arange(5.0)
        plain = torch.zeros(3).scatter_add_(0, index, source)
        made = torch.zeros(3).scatter_add_(0, shard_tensor(index, rows), shard_tensor(source, rows))
        assert type(made) is torch.Tensor
        assert torch.equal(made, plain)
        with pytest.raises(IndexError, match="mask"):
            sharded[torch.tensor([True])] = 9.0
    for mistake in (
        lambda: torch.histc(shard_tensor(torch.ones(1), rows), bins=3, min=2, max=1),
        lambda: torch.bincount(shard_tensor(torch.ones(1), rows)),
        lambda: torch.bincount(shard_tensor(torch.tensor([1, 2, 1]), rows), weights=torch.ones(4)),
        lambda: torch.bincount(shard_tensor(torch.tensor([1, -2, 1]), rows)),
    ):
        with shardwise.gather_budget(0), pytest.raises(RuntimeError):
            mistake()
    assert sharded.sum().item() == 15


@ranks(2)
def test_plain_values_are_added_at_plain_indices() -> None:
    """Into a sharded tensor, in which only one operand is cut."""
    index, source = torch.tensor([[0, 3], [1, 2]]), torch.ones(2, 2, dtype=torch.float64)
    plain = torch.arange(24, dtype=torch.float64).reshape(6, 4)
    for dim in (0, 1):
        found = shard_tensor(plain, chunks(dim, 0, 1)).scatter_add(1, index, source)
        assert torch.equal(found.full_tensor(), plain.scatter_add(1, index, source))


@ranks(3)
def test_gather_at_indices_and_the_old_gather_of_this_name() -> None:
    """By position and by name, of every dtype: all ranks give indices, one of them gives what is to be filled."""
    index = torch.tensor([[0, 2, 1], [2, 0, 0], [1, 1, 1], [1, 0, 2]])
    one = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for dtype in (torch.float64, torch.int64, torch.int32, torch.bool):
        table = (torch.arange(12).reshape(4, 3) % 5).to(dtype)
        sharded = shard_tensor(table, chunks(0, 0, 2))
        alone = shard_tensor(table, chunks(0, dist.get_rank()), process_group=one)
        for at in (index, index[:, :1], index.to(torch.int32), shard_tensor(index, chunks(1, 1, 0))):
            plain = at.full_tensor() if isinstance(at, ShardedTensor) else at
            calls = [sharded.gather(1, at), sharded.gather(1, index=at), sharded.gather(dim=1, index=at)]
            calls += [alone.gather(1, plain)]
            for found in calls:
                assert torch.equal(found.full_tensor(), table.gather(1, plain))
        for dst in (0, 1):
            out = torch.empty(4, 3, dtype=dtype) if dist.get_rank() == dst else None
            sharded.gather(dst, out)
            sharded.gather(dst=dst, out=out)
            assert out is None or torch.equal(out, table)
        with shardwise.settings.own_batches():
            out = torch.empty(4, 3, dtype=dtype)
            alone.gather(0, out)
            assert torch.equal(out, table)
            assert torch.equal(sharded.gather(1, index).full_tensor(), table.gather(1, index))
    integers = shard_tensor(torch.arange(12).reshape(4, 3), chunks(0, 0, 1))
    with pytest.raises(ValueError, match="should be"):
        integers.gather(1, torch.empty(2, 2, dtype=torch.int64) if dist.get_rank() == 1 else None)
    with pytest.raises(ValueError, match="must NOT be specified"):
        integers.gather(1, None if dist.get_rank() == 1 else index)


@ranks(2)
def test_a_mask_that_selects_nothing() -> None:
    """Nothing is written, whether the mask and the values are sharded or plain."""
    x, values = torch.arange(25.0).reshape(5, 5), torch.ones(5)
    rows = chunks(0, 0, 1)
    for mask in (torch.zeros(5, dtype=torch.bool), torch.tensor([True, False, True, True, False])):
        for accumulate in (False, True):
            expected = torch.index_put(x, (mask,), values, accumulate=accumulate)
            for given in ((mask, values), (shard_tensor(mask, rows), shard_tensor(values, rows))):
                found = torch.index_put(shard_tensor(x, rows), (given[0],), given[1], accumulate=accumulate)
                assert torch.equal(found.full_tensor(), expected)


@ranks(4)
def test_the_backward_of_pooling_as_an_op_of_its_own() -> None:
    """With nothing gathered, and its operands in different layouts: the same on every rank, and differentiable."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 6, 6, dtype=torch.float64, generator=generator)
    pooling = ([3, 3], [2, 2], [1, 1], [1, 1], False)
    made, index = torch.ops.aten.max_pool2d_with_indices(x, *pooling)
    leaf = made.clone().requires_grad_()
    expected = torch.ops.aten.max_pool2d_with_indices_backward(leaf, x, *pooling, index)
    (expected * x).sum().backward()
    specs = [chunks(0, 3, 1, 3), chunks(3, 0, 1, 2, 3), chunks(1, 2), shardwise.ReplicatedShardingSpec(["rank:0/cpu"])]
    for k, spec in enumerate(specs):
        for at in (index, shard_tensor(index, specs[k - 1])):
            grad, given = shard_tensor(made, spec).requires_grad_(), shard_tensor(x, specs[k - 2])
            with shardwise.gather_budget(0):
                found = torch.ops.aten.max_pool2d_with_indices_backward(grad, given, *pooling, at)
                torch.testing.assert_close(found.detach().full_tensor(), expected.detach())
                (found * x).sum().backward()
                torch.testing.assert_close(grad.grad.full_tensor(), leaf.grad)
                pooled = F.max_unpool2d(*F.max_pool2d(given.requires_grad_(), 2, return_indices=True), 2)
                pooled.square().sum().backward()
            twin = x.clone().requires_grad_()
            F.max_unpool2d(*F.max_pool2d(twin, 2, return_indices=True), 2).square().sum().backward()
            torch.testing.assert_close(given.grad.full_tensor(), twin.grad)
