"""Experts on ranks with CUDA: NCCL ranks and gloo ranks, one wait of the host, and rebalancing."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ROUNDING
from tests.models.twins import assert_same_gradients, whole
from tests.nn.experts.cases import Mixture, mixture
from tests.nn.experts.test_layer import PLACEMENTS, SIZES, batch

import shardwise
from shardwise import plans
from shardwise.testing import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def twins(placement: Any, rest: Any = None) -> tuple[Mixture, Mixture]:
    """Plain and with experts on ranks."""
    plain = mixture().cuda()
    model = copy.deepcopy(plain)
    return plain, shardwise.shard_module(model, plans.expert_parallel(model, placement=placement, rest=rest))


def own(x: torch.Tensor) -> Any:
    """This rank's tokens."""
    return shardwise.from_local(x.split(SIZES)[dist.get_rank()], sizes=SIZES)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_placements(backend: str) -> None:
    """As on CPUs."""
    ranks(4, backend=backend)(_trained)()


def _trained() -> None:
    x = batch().cuda()
    for placement in PLACEMENTS.values():
        plain, twin = twins(placement, plans.FullyShard())
        expected, found = plain(x), twin(own(x))
        torch.testing.assert_close(whole(found), expected.detach(), rtol=ROUNDING, atol=ROUNDING)
        (expected**2).sum().backward()
        (found**2).sum().backward()
        assert_same_gradients(twin, plain)


@ranks(2, backend="nccl")
def test_the_host_waits_once_in_a_forward_and_never_in_a_backward() -> None:
    """For the numbers of tokens; experts that loop over their choices wait by themselves."""
    _, twin = twins([0, 0, 0, 1, 1, 1, 1])
    x = shardwise.from_local(batch(64).cuda()).requires_grad_()
    weights, chosen = (one.detach() for one in torch.topk(torch.softmax(twin.router(x.detach()), -1), 2, -1))
    for _ in range(2):
        twin.experts(x, chosen, weights).backward(x.detach())
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")  # which warns, too
            noted.clear()
            made = twin.experts(x, chosen, weights)
            forward = len(noted)
            made.backward(x.detach())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (forward, len(noted)) == (1, 1)


@ranks(4, backend="nccl")
def test_rebalanced() -> None:
    """Parameters and states of the optimizer move, and training goes on."""
    x = batch().cuda()
    plain, twin = twins(PLACEMENTS["in order"])
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (plain, twin)]
    for _ in range(3):
        for model, optimizer, given in ((plain, optimizers[0], x), (twin, optimizers[1], own(x))):
            optimizer.zero_grad()
            (model(given) ** 2).sum().backward()
            optimizer.step()
        shardwise.rebalance(twin, room=[3, 3, 2, 2], optimizer=optimizers[1])
    for one, other in zip(plain.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(whole(other), one.detach(), rtol=1e-9, atol=1e-9)
