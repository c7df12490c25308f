"""Attention over a sequence in pieces: results and gradients of the plain tensors, wherever the sequence is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import assert_close, boxes, chunks, places
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import shardwise
from shardwise import GridShardingSpec, ReplicatedShardingSpec, ShardedTensor, ShardingSpec
from shardwise.comm.tracing import trace
from shardwise.errors import UnsupportedOpError
from shardwise.ops.attention import block_plan, dropout, kernels
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

LENGTH, HEADS, GROUPS, WIDTH = 13, 4, 2, 8


def values(*size: int, seed: int) -> torch.Tensor:
    """The same on every rank."""
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def pieces(heads: int, *cuts: tuple[int, int], width: int = WIDTH) -> ShardingSpec:
    """Pieces of a sequence of two samples, by length and rank."""
    rows, begin = [], 0
    for length, rank in cuts:
        rows.append(([0, 0, begin, 0], [2, heads, length, width], rank))
        begin += length
    return boxes(*rows)


FIRST_AND_LAST = ((2, 0), (2, 1), (1, 2), (2, 3), (1, 3), (2, 2), (2, 1), (1, 0))
# How queries of four ranks are cut, and keys and values; each for a number of heads.
CUTS: dict[str, tuple[Any, Any]] = {
    "even": (lambda h: chunks(2, 0, 1, 2, 3), lambda h: chunks(2, 0, 1, 2, 3)),
    "first and last": (lambda h: pieces(h, *FIRST_AND_LAST), lambda h: pieces(h, *FIRST_AND_LAST)),
    "any order, one rank without any": (
        lambda h: pieces(h, (1, 3), (5, 0), (0, 1), (3, 3), (4, 1)),
        lambda h: pieces(h, (1, 3), (5, 0), (0, 1), (3, 3), (4, 1)),
    ),
    "queries and keys at different places": (
        lambda h: pieces(h, (4, 1), (9, 0)),
        lambda h: pieces(h, (2, 3), (6, 0), (5, 2)),
    ),
    "keys in replicas": (lambda h: chunks(2, 0, 1, 2, 3), lambda h: ReplicatedShardingSpec(places(0, 2, 3))),
    "heads and positions": (
        lambda h: GridShardingSpec((1, 2), [places(0, 1), places(2, 3)]),
        lambda h: GridShardingSpec((1, 2), [places(0, 1), places(2, 3)]),
    ),
    "samples and positions": (
        lambda h: GridShardingSpec((0, 2), [places(0, 1), places(2, 3)]),
        lambda h: GridShardingSpec((2, 0), [places(0, 1), places(2, 3)]),
    ),
    "replicas of pieces": (
        lambda h: GridShardingSpec((None, 2), [places(0, 1), places(2, 3)]),
        lambda h: GridShardingSpec((None, 2), [places(0, 1), places(2, 3)]),
    ),
}
FORMS: dict[str, dict[str, Any]] = {
    "all keys": {},
    "causal": {"is_causal": True},
    "scaled": {"is_causal": True, "scale": 0.1},
    "mask of truths": {"attn_mask": values(2, 1, LENGTH, LENGTH, seed=7) > -0.3},
    "mask of numbers": {"attn_mask": values(LENGTH, LENGTH, seed=8)},
    "mask of heads and keys": {"attn_mask": values(1, HEADS, 1, LENGTH, seed=9) > -1},
}


def assert_alike(cut: str, form: dict[str, Any], *, groups: int = HEADS, value_width: int = WIDTH) -> None:
    """Two calls, of which the second one runs a program, each with its gradients."""
    sizes = (2, HEADS, LENGTH, WIDTH), (2, groups, LENGTH, WIDTH), (2, groups, LENGTH, value_width)
    operands = [values(*size, seed=k) for k, size in enumerate(sizes)]
    options = {**form, "enable_gqa": groups != HEADS}
    plain = [one.clone().requires_grad_() for one in operands]
    expected = scaled_dot_product_attention(*plain, **options)
    weight = values(*expected.shape, seed=5)
    (expected * weight).sum().backward()
    specs = CUTS[cut][0](HEADS), CUTS[cut][1](groups), CUTS[cut][1](groups)
    for number in range(2):
        tried = [shard_tensor(one, spec).requires_grad_() for one, spec in zip(operands, specs, strict=True)]
        with shardwise.gather_budget(0), trace() as seen:
            found = scaled_dot_product_attention(*tried, **options)
            (found * weight).sum().backward()
        assert isinstance(found, ShardedTensor)
        assert value_width != WIDTH or found.sharding == tried[0].sharding
        assert_close(found.detach().full_tensor(), expected.detach(), cut)
        for one, other in zip(tried, plain, strict=True):
            assert_close(one.grad.full_tensor(), other.grad, f"gradient, {cut}")
        assert number == 0 or not [one for one in seen.uncached if "scaled_dot" in str(one)], seen.uncached


@pytest.mark.parametrize("form", FORMS)
@ranks(4)
def test_every_cut(form: str) -> None:
    """Queries stay where they are; several heads of them share one of the keys, too few for all ranks."""
    for cut in CUTS:
        assert_alike(cut, FORMS[form], groups=GROUPS)


@ranks(4)
def test_as_many_heads_of_keys() -> None:
    """Every rank can have a head, and does where that is cheaper."""
    for cut in CUTS:
        assert_alike(cut, {"is_causal": True})


@ranks(4)
def test_values_of_another_width() -> None:
    """No kernel takes them; the formula does, for a few queries at a time."""
    for cut in ("even", "keys in replicas"):
        assert_alike(cut, {"is_causal": True}, value_width=3)


@ranks(4)
def test_one_round_for_each_rank() -> None:
    """Where keys and values of all ranks would take much memory, they come rank by rank."""
    block_plan.make_block_plan.cache_clear()
    before, block_plan.ROUND_BYTES = block_plan.ROUND_BYTES, 1
    try:
        for cut in CUTS:
            for form in ("causal", "mask of truths"):
                assert_alike(cut, FORMS[form], groups=GROUPS)
    finally:
        block_plan.ROUND_BYTES = before
        block_plan.make_block_plan.cache_clear()


@ranks(3)
def test_ranks_of_a_group() -> None:
    """Sequences over some of the ranks."""
    group = dist.new_group([2, 0])
    if dist.get_rank() == 1:
        return
    plain = [values(1, 2, 9, 4, seed=k).requires_grad_() for k in range(3)]
    expected = scaled_dot_product_attention(*plain, is_causal=True)
    (expected**2).sum().backward()
    tried = [shardwise.shard(one.detach(), 2, process_group=group).requires_grad_() for one in plain]
    found = scaled_dot_product_attention(*tried, is_causal=True)
    (found**2).sum().backward()
    assert_close(found.detach().full_tensor(), expected.detach())
    for one, other in zip(tried, plain, strict=True):
        assert_close(one.grad.full_tensor(), other.grad)


@ranks(4)
def test_only_keys_that_are_seen_travel() -> None:
    """Of causal attention in even pieces, each rank gets what lies before its own piece, once, and sends as much."""
    tensors = [shardwise.shard(values(1, 1, 16, 4, seed=k), 2) for k in range(3)]
    with trace() as seen:
        scaled_dot_product_attention(*tensors, is_causal=True)
    received = sum(one.received for one in seen.events)
    assert received == dist.get_rank() * 4 * 8 * 8  # positions of a piece, width of keys and values, bytes
    assert seen.count() <= 1


@ranks(4)
def test_whole_sequences_of_some_heads() -> None:
    """Where all ranks can have as many heads, and few bytes travel for it, sequences are whole while they compute."""
    sizes = (1, 4, 16, 8), (1, 4, 16, 8), (1, 4, 16, 3)
    plain = [values(*size, seed=k).requires_grad_() for k, size in enumerate(sizes)]
    expected = scaled_dot_product_attention(*plain, is_causal=True)
    (expected**2).sum().backward()
    tried = [shardwise.shard(one.detach(), 2).requires_grad_() for one in plain]
    for _ in range(2):
        for one in tried:
            one.grad = None
        with trace() as seen:
            found = scaled_dot_product_attention(*tried, is_causal=True)
        kinds = [one.kind for one in seen.events]
        assert kinds == ["exchange"] * 2  # of queries, keys and values together, and of the result
        (found**2).sum().backward()
        assert found.sharding.ranks.tolist() == [0, 1, 2, 3]
        assert found.sharding.cuts(2)
        assert_close(found.detach().full_tensor(), expected.detach())
        for one, other in zip(tried, plain, strict=True):
            assert_close(one.grad.full_tensor(), other.grad)


@ranks(2)
def test_gradient_of_one_operand() -> None:
    """What wants no gradient gets none."""
    plain = [values(1, 2, 6, 4, seed=k) for k in range(3)]
    plain[1].requires_grad_()
    scaled_dot_product_attention(*plain).sum().backward()
    tried = [shardwise.shard(one.detach(), 2) for one in plain]
    tried[1].requires_grad_()
    scaled_dot_product_attention(*tried).sum().backward()
    assert_close(tried[1].grad.full_tensor(), plain[1].grad)
    assert tried[0].grad is None


@pytest.mark.parametrize("power", [1, 2])
@ranks(4)
def test_twice_differentiated(power: int) -> None:
    """As torch's kernels, it refuses to be differentiated twice, on every rank: also where the gradient of the result
    is a constant, and on ranks without a piece."""
    spec = pieces(4, (3, 0), (4, 3), width=4)
    tensors = [shard_tensor(values(2, 4, 7, 4, seed=k), spec).requires_grad_() for k in range(3)]
    with sdpa_kernel(SDPBackend.MATH):
        found = scaled_dot_product_attention(*tensors, is_causal=True).pow(power).sum()
        (grad,) = torch.autograd.grad(found, tensors[:1], create_graph=True)
        with pytest.raises(UnsupportedOpError, match="cannot be differentiated twice"):
            grad.pow(2).sum().backward()


@pytest.mark.parametrize("empty", [[0, 0, 0, 0], [2, 0, 10, 8], [2, 4, 10, 0], [2, 4, 0, 8], [0, 4, 10, 8]])
@ranks(4)
def test_empty_boxes(empty: list[int]) -> None:
    """Of whatever sizes: no samples, heads, positions or width; one rank has such a box, and one has none."""
    spec = boxes(([0, 0, 0, 0], [2, HEADS, 10, WIDTH], 0), ([0, 0, 0, 0], empty, 1), ([0, 0, 10, 0], [2, 4, 3, 8], 2))
    for form in ("all keys", "causal"):
        plain = [values(2, HEADS, LENGTH, WIDTH, seed=k).requires_grad_() for k in range(3)]
        tried = [shard_tensor(one.detach(), spec).requires_grad_() for one in plain]
        expected, found = (scaled_dot_product_attention(*each, **FORMS[form]) for each in (plain, tried))
        assert_close(found.detach().full_tensor(), expected.detach(), form)
        for each in (expected, found):
            each.pow(2).sum().backward()
        for one, other in zip(tried, plain, strict=True):
            assert_close(one.grad.full_tensor(), other.grad, f"gradient, {form}")


@pytest.mark.parametrize("form", ["causal", "mask of truths"])
@ranks(4)
def test_dropout(form: str) -> None:
    """From the same seed, what a plain tensor drops, in every cut; in the backward, too."""
    operands = [values(2, HEADS, LENGTH, WIDTH, seed=k) for k in range(3)]
    plain = [one.clone().requires_grad_() for one in operands]
    torch.manual_seed(3)
    expected = [scaled_dot_product_attention(*plain, dropout_p=0.4, **FORMS[form]) for _ in range(2)]
    (expected[0] * expected[1]).sum().backward()
    assert not torch.equal(*expected)
    for cut in CUTS:
        specs = CUTS[cut][0](HEADS), CUTS[cut][1](HEADS), CUTS[cut][1](HEADS)
        tried = [shard_tensor(one, spec).requires_grad_() for one, spec in zip(operands, specs, strict=True)]
        torch.manual_seed(3)
        with trace() as seen:
            found = [scaled_dot_product_attention(*tried, dropout_p=0.4, **FORMS[form]) for _ in range(2)]
            (found[0] * found[1]).sum().backward()
        for one, other in zip(found, expected, strict=True):
            assert_close(one.detach().full_tensor(), other.detach(), cut)
        for one, other in zip(tried, plain, strict=True):
            assert_close(one.grad.full_tensor(), other.grad, f"gradient, {cut}")
        assert len([one for one in seen.uncached if "scaled_dot" in str(one)]) <= 1


@ranks(4)
def test_dropout_of_many_weights() -> None:
    """What is drawn by tiles does not depend on the cut, nor on how many queries are computed at a time."""
    small, dropout.SMALL = dropout.SMALL, 0
    scores = kernels.SCORES
    try:
        found = []
        for cut, kernels.SCORES in (("even", 1 << 22), ("first and last", 50), ("samples and positions", 1)):
            specs = CUTS[cut][0](HEADS), CUTS[cut][1](HEADS), CUTS[cut][1](HEADS)
            tried = [shard_tensor(values(2, HEADS, LENGTH, WIDTH, seed=k), one) for k, one in enumerate(specs)]
            for one in tried:
                one.requires_grad_()
            torch.manual_seed(5)
            made = scaled_dot_product_attention(*tried, dropout_p=0.3, is_causal=True)
            (made**2).sum().backward()
            found.append([made.detach().full_tensor(), *(one.grad.full_tensor() for one in tried)])
        plain = scaled_dot_product_attention(
            *(values(2, HEADS, LENGTH, WIDTH, seed=k) for k in range(3)), is_causal=True
        )
        assert not torch.allclose(found[0][0], plain)
        for others in found[1:]:
            for one, other in zip(found[0], others, strict=True):
                assert_close(one, other)
    finally:
        dropout.SMALL, kernels.SCORES = small, scores
