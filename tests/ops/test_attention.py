"""Attention: every form of it, whatever is cut, without gathering where samples, heads or queries are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cases import assert_close, chunks
from torch.nn.functional import scaled_dot_product_attention

import shardwise
from shardwise import ShardedTensor
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks


def values(*size: int, seed: int) -> torch.Tensor:
    """The same on every rank."""
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def given(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], mask: Any = None) -> list[Any]:
    """Tensors of these sizes."""
    return [None if size is None else values(*size, seed=k) for k, size in enumerate((query, key, value, mask))]


FORMS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "plain": (given((3, 4, 5, 6), (3, 4, 7, 6), (3, 4, 7, 2)), {"scale": 0.3}),
    "causal": (given((3, 4, 5, 6), (3, 4, 5, 6), (3, 4, 5, 6)), {"is_causal": True}),
    "mask of queries and keys": (given((3, 4, 5, 6), (3, 4, 7, 6), (3, 4, 7, 6), (5, 7)), {}),
    "mask of truths": ([*given((3, 4, 5, 6), (3, 4, 7, 6), (3, 4, 7, 6))[:3], values(5, 7, seed=3) > -0.8], {}),
    "mask of keys": (given((3, 4, 5, 6), (3, 4, 7, 6), (3, 4, 7, 6), (7,)), {}),
    "mask of samples and keys": (given((3, 4, 5, 6), (3, 4, 7, 6), (3, 4, 7, 6), (3, 1, 1, 7)), {}),
    "mask of all": (given((3, 4, 5, 6), (3, 4, 7, 6), (3, 4, 7, 6), (3, 4, 5, 7)), {}),
    "grouped": (given((3, 6, 5, 6), (3, 2, 7, 6), (3, 2, 7, 6), (3, 1, 5, 7)), {"enable_gqa": True}),
    "one key for all": (given((3, 6, 5, 6), (3, 1, 7, 6), (3, 1, 7, 6)), {"enable_gqa": True}),
    "groups of keys and of values": (given((3, 6, 5, 6), (3, 2, 7, 6), (3, 3, 7, 6)), {"enable_gqa": True}),
    "heads": (given((4, 5, 6), (4, 7, 6), (4, 7, 6)), {}),
    "one head": (given((5, 6), (7, 6), (7, 6)), {}),
    "two dims of samples": (given((2, 3, 4, 5, 6), (2, 3, 4, 7, 6), (2, 3, 4, 7, 6)), {}),
    "broadcast": (given((3, 4, 5, 6), (1, 4, 7, 6), (1, 1, 7, 6)), {}),
}


@pytest.mark.parametrize("form", FORMS)
@ranks(3)
def test_every_form(form: str) -> None:
    """Each dim cut, of the query alone or of all three, on ranks with several shards and with none."""
    operands, options = FORMS[form]
    plain = [None if one is None else one.clone().requires_grad_(one.is_floating_point()) for one in operands]
    expected = scaled_dot_product_attention(*plain, **options)
    weight = values(*expected.shape, seed=9)
    (expected * weight).sum().backward()
    for dim in range(operands[0].ndim):
        for several in (1, 3) if operands[3] is None else (1, 3, 4):  # the query, with keys and values, with the mask
            tried: list[Any] = []
            for number, one in enumerate(operands):
                cut = one is not None and number < several and dim < one.ndim
                made = shard_tensor(one, chunks(dim, 0, 1, 0)) if cut else one
                tried.append(None if made is None else made.detach().clone().requires_grad_(made.is_floating_point()))
            with shardwise.gather_budget(0):
                found = scaled_dot_product_attention(*tried, **options)
                (found * weight).sum().backward()
            assert_close(found.detach().full_tensor(), expected.detach(), f"dim {dim}")
            for one, other in zip(tried, plain, strict=True):
                if one is not None and one.requires_grad:
                    grad = one.grad.full_tensor() if isinstance(one, ShardedTensor) else one.grad
                    assert_close(grad, other.grad, f"gradient, dim {dim}")
