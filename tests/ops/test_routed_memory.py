"""Ops that gather nothing make no tensor of the size of a whole one either: no indices, no padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import shardwise
from shardwise.ops.families.distances import places_of_pairs
from shardwise.testing import ranks

SIZE = 40_009  # a prime number
OPS: dict[str, Callable[[Any], Any]] = {
    "pad": lambda x: functional.pad(x, (2 * SIZE, SIZE), value=1.5),
    "pad of rows": lambda x: functional.pad(x[:, None], (3, 4)),
    "unfold": lambda x: x.unfold(0, 4, 3),
    "as_strided": lambda x: torch.as_strided_copy(x, (SIZE // 4, 3), (3, 1), 5),
    "prime fft": lambda x: torch.fft.fft(x),
    "pdist": lambda x: functional.pdist(x[:40_000].reshape(400, 100)),
    "nonzero_static": lambda x: torch.nonzero_static(x > 3, size=2 * SIZE),
    "unique rows": lambda x: torch.unique((x * 2).round()[:40_000].reshape(8000, 5), dim=0, return_counts=True)[1],
}


@pytest.mark.parametrize("name", OPS)
@ranks(4)
def test_no_rank_makes_a_tensor_of_all_elements(name: str) -> None:
    """Of four ranks each makes about a quarter of the larger of operand and result, or, in a message, twice that."""
    x = torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = OPS[name](x)
    given = shardwise.shard(x, 0)
    with shardwise.gather_budget(0), torch.profiler.profile(profile_memory=True) as profile:
        found = OPS[name](given)
    most = max(profile.events(), key=lambda event: event.self_cpu_memory_usage)
    elements = max(expected.numel(), SIZE)
    if name == "prime fft":  # convolved as a power of two of complex numbers, with as much beside it
        elements = 2 * 2**17
    if name == "pdist":  # of all pairs, both ways
        elements = 400 * 400
    assert elements * 8 / 16 < most.self_cpu_memory_usage < 0.6 * elements * 8, most.name
    torch.testing.assert_close(found.full_tensor(), expected)


def test_places_of_pairs() -> None:
    """Also where the root is rounded."""
    for count in (2, 3, 7, 1001):
        first, second = torch.triu_indices(count, count, 1)
        assert torch.equal(places_of_pairs(torch.arange(len(first)), count), first * count + second)
    count = 3_000_000
    rows = torch.tensor([0, 1, 17, count // 2, count - 3, count - 2])
    begins = rows * (2 * count - rows - 1) // 2
    assert torch.equal(places_of_pairs(begins, count), rows * count + rows + 1)
    assert torch.equal(places_of_pairs(begins[1:] - 1, count), (rows[1:] - 1) * count + count - 1)
