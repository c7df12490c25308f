"""addmm and its kin: what is multiplied by 0 is ignored, whatever it holds, and gets a gradient of zeros."""

from __future__ import annotations

from typing import Any

import torch
from tests.cases import assert_close, boxes, chunks

from shardwise import ReplicatedShardingSpec, ShardedTensor, gather_budget
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

SIZES: dict[str, tuple[tuple[int, ...], ...]] = {
    "addmm": ((5, 4), (5, 6), (6, 4)),
    "addmm of a row": ((4,), (5, 6), (6, 4)),
    "addbmm": ((5, 4), (3, 5, 6), (3, 6, 4)),
    "baddbmm": ((3, 5, 4), (3, 5, 6), (3, 6, 4)),
    "addmv": ((5,), (5, 6), (6,)),
    "addr": ((5, 4), (5,), (4,)),
}
FACTORS: list[dict[str, Any]] = [{"alpha": 0}, {"beta": 0, "alpha": 2.5}, {"beta": 0.5, "alpha": 0}]


@ranks(4)
def test_what_is_multiplied_by_zero() -> None:
    """Values and gradients, sharded and plain, on layouts with a rank without shards, several and replicas."""
    generator = torch.Generator().manual_seed(0)
    for name, sizes in SIZES.items():
        op = getattr(torch, name.split()[0])
        values = [torch.randn(size, dtype=torch.float64, generator=generator) for size in sizes]
        for factors in FACTORS:
            given = [value.clone() for value in values]
            if factors.get("beta") == 0:
                given[0].fill_(torch.nan)
            elif name not in (
                "addr",
                "baddbmm",
            ):  # torch ignores products in kernels for large matrices, and not in others
                given[1][0].fill_(torch.inf)
            leaves = [value.clone().requires_grad_() for value in given]
            expected = op(*leaves, **factors)
            expected.square().sum().backward()
            for which, kind in (((0, 1, 2), 0), ((0, 1, 2), 2), ((0,), 1), ((1,), 2)):
                found = [
                    (shard_tensor(value, _spec(kind, value)) if k in which else value.clone()).requires_grad_()
                    for k, value in enumerate(given)
                ]
                with gather_budget(0):
                    made = op(*found, **factors)
                made.square().sum().backward()
                what = f"{name} {factors}, sharded {which}, layout {kind}"
                _assert_same(made.detach(), expected.detach(), what)
                for one, other in zip(found, leaves, strict=True):
                    assert one.grad is not None, what
                    _assert_same(one.grad, other.grad, what)


def _spec(kind: int, value: torch.Tensor) -> Any:
    if kind == 0:
        return chunks(value.ndim - 1, 3, 1, 3)
    if kind == 1:
        return ReplicatedShardingSpec(["rank:0/cpu", "rank:2/cpu"])
    rest = list(value.shape[1:])
    return boxes(([0] * value.ndim, [1, *rest], 0), ([1] + [0] * len(rest), [value.shape[0] - 1, *rest], 2))


def _assert_same(found: Any, expected: Any, what: str) -> None:
    whole = found.full_tensor() if isinstance(found, ShardedTensor) else found
    assert torch.equal(whole.isnan(), expected.isnan()), what
    assert_close(whole.nan_to_num(), expected.nan_to_num(), what)
