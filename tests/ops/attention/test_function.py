"""`shardwise.attention`: windows and documents beside the same as a mask, in any cut of the sequence."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import assert_close, chunks
from tests.ops.attention.test_in_pieces import CUTS, values

import shardwise
from shardwise import ShardedTensor
from shardwise.comm.tracing import trace
from shardwise.errors import PropertyError
from shardwise.ops.attention import Documents
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

LENGTH = 13
SIZE = (2, 4, LENGTH, 8)
EACH = [[0, 5], [0, 1, 9]]  # documents of each sample
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"causal": True, "window": 4},
    "window on both sides": {"window": 3},
    "window of one": {"causal": True, "window": 1},
    "documents": {"causal": True, "documents": [0, 6, 7]},
    "documents of each sample": {"documents": EACH},
    "window and documents": {"causal": True, "window": 3, "documents": EACH},
}


def seen(causal: bool = False, window: int | None = None, documents: Any = None) -> torch.Tensor:
    """True where a query of a sample sees a key."""
    made = torch.zeros(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    for sample, i, j in itertools.product(range(2), range(LENGTH), range(LENGTH)):
        begins = [0] if documents is None else documents[sample] if isinstance(documents[0], list) else documents
        same = sum(b <= i for b in begins) == sum(b <= j for b in begins)
        near = window is None or abs(i - j) < window
        made[sample, 0, i, j] = same and near and not (causal and j > i)
    return made


@pytest.mark.parametrize("option", OPTIONS)
@ranks(4)
def test_every_cut(option: str) -> None:
    """The second call runs a program; plain tensors give the same."""
    options = OPTIONS[option]
    operands = [values(*SIZE, seed=k) for k in range(3)]
    operands[1:] = [one[:, :2].clone() for one in operands[1:]]  # groups of heads
    plain = [one.clone().requires_grad_() for one in operands]
    expected = torch.nn.functional.scaled_dot_product_attention(*plain, attn_mask=seen(**options), enable_gqa=True)
    weight = values(*SIZE, seed=5)
    (expected * weight).sum().backward()
    assert_close(shardwise.attention(*operands, **options), expected.detach())
    for cut in CUTS:
        specs = CUTS[cut][0](4), CUTS[cut][1](2), CUTS[cut][1](2)
        for number in range(2):
            tried = [shard_tensor(one, spec).requires_grad_() for one, spec in zip(operands, specs, strict=True)]
            with trace() as watched:
                found = shardwise.attention(*tried, **options)
                (found * weight).sum().backward()
            assert isinstance(found, ShardedTensor)
            assert_close(found.detach().full_tensor(), expected.detach(), cut)
            for one, other in zip(tried, plain, strict=True):
                assert_close(one.grad.full_tensor(), other.grad, f"gradient, {cut}")
            assert number == 0 or not [one for one in watched.uncached if "attention" in str(one)]


@ranks(4)
def test_keys_beyond_a_window_do_not_travel() -> None:
    """A rank hears from the rank before it alone, however many there are."""
    tensors = [shardwise.shard(values(1, 1, 16, 4, seed=k), 2) for k in range(3)]
    with trace() as watched:
        shardwise.attention(*tensors, causal=True, window=3)
    received = sum(one.received for one in watched.events)
    assert received == (2 * 8 * 8 if dist.get_rank() else 0)  # two keys and values, their width, bytes


@ranks(4)
def test_documents_on_one_rank_send_nothing() -> None:
    """Where no document is cut, nothing travels."""
    tensors = [shardwise.shard(values(1, 1, 16, 4, seed=k), 2) for k in range(3)]
    with trace() as watched:
        shardwise.attention(*tensors, documents=[0, 4, 8, 10, 12])
    assert not watched.events


@pytest.mark.parametrize("keys", [8, 3])
@pytest.mark.parametrize("documents", [[0, 5], [0, 5, 100], [0, 2, 7, 8]])
@ranks(2)
def test_documents_that_end_behind_the_last_key(documents: list[int], keys: int) -> None:
    """Queries of a document without keys see nothing."""
    plain = [values(1, 2, length, 4, seed=k) for k, length in enumerate((8, keys, keys))]
    tried = [shardwise.shard(one, 2) for one in plain]
    for one in (*plain, *tried):
        one.requires_grad_()
    for options in ({}, {"causal": True}, {"window": 3}):
        expected = shardwise.attention(*plain, documents=documents, **options)
        found = shardwise.attention(*tried, documents=documents, **options)
        assert_close(found.full_tensor(), expected)
        gradients = torch.autograd.grad(expected.square().sum(), plain)
        made = torch.autograd.grad(found.square().sum(), tried)
        for one, other in zip(made, gradients, strict=True):
            assert_close(one.full_tensor(), other)


@ranks(2)
def test_autocast_leaves_float64_alone() -> None:
    """As torch's autocast does."""
    tensors = [shardwise.shard(values(1, 1, 6, 4, seed=k).double(), 2) for k in range(3)]
    with torch.autocast("cpu"):
        assert shardwise.attention(*tensors, window=3).dtype == torch.float64


@ranks(2)
def test_heads_cut_within_a_group() -> None:
    """A rank has one head of queries, of which two share keys: it is computed with a mask."""
    operands = [values(1, 2, 6, 4, seed=0), values(1, 1, 6, 4, seed=1), values(1, 1, 6, 4, seed=2)]
    expected = shardwise.attention(*operands, causal=True, window=2)
    tried = [shard_tensor(operands[0], chunks(1, 0, 1)), *(shardwise.replicate(one) for one in operands[1:])]
    assert_close(shardwise.attention(*tried, causal=True, window=2).full_tensor(), expected)


def test_documents_by_positions() -> None:
    """Documents begin where positions begin anew."""
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    assert Documents.from_positions(positions) == Documents.of([[0, 3], [0]])
    assert Documents.from_positions(positions[1:]) is None
    assert Documents.of([[3], [0, 3]]) == Documents.of([3])
    assert Documents.of([3]).by_sample(7) == ((0, 3),)


def test_wrong_options() -> None:
    """What is no window and no document is said."""
    tensors = [values(1, 1, 4, 4, seed=k) for k in range(3)]
    with pytest.raises(PropertyError, match="at least 1"):
        shardwise.attention(*tensors, window=0)
    with pytest.raises(PropertyError, match="positions at which they begin"):
        shardwise.attention(*tensors, documents=[-1])
    with pytest.raises(PropertyError, match="documents of 2 samples"):
        shardwise.attention(*tensors, documents=[[0], [0, 2]])
