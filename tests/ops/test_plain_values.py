"""Plain operands that are not the same on every rank: found in the first calls, without a message of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from tests.cases import chunks
from tests.comm.disagreement.given import impatient
from torch import nn
from torch.nn import functional

import shardwise
from shardwise import ShardingPlan
from shardwise.errors import PlainValueError
from shardwise.ops.engine.plain_values import fingerprint
from shardwise.testing import ranks

WIDTH = 6


def model_in_pieces() -> nn.Module:
    """Two layers, cut as tensor parallelism cuts them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH))
    return shardwise.shard_module(
        model, ShardingPlan({"0.weight": chunks(0, 0, 1), "0.bias": chunks(0, 0, 1), "2.weight": chunks(1, 0, 1)})
    )


def own(*size: int) -> torch.Tensor:
    """What each rank has drawn for itself."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(1 + dist.get_rank()))


def own_ids(*size: int) -> torch.Tensor:
    """The same of whole numbers."""
    return torch.randint(WIDTH, size, generator=torch.Generator().manual_seed(1 + dist.get_rank()))


def a_batch() -> None:
    """Each rank's own batch, as under DDP."""
    model_in_pieces()(own(4, WIDTH)).square().mean().item()


def a_large_batch() -> None:
    """The same, of which not all is read."""
    model_in_pieces()(own(20_000, WIDTH)).square().mean().item()


def a_batch_of_unequal_size() -> None:
    """Ranks have different numbers of samples."""
    model_in_pieces()(torch.ones(3 + 2 * dist.get_rank(), WIDTH)).square().mean().item()


def labels() -> None:
    """The batch is the same; the labels are not."""
    scores = model_in_pieces()(torch.ones(4, WIDTH))
    functional.cross_entropy(scores, own_ids(4)).item()


def a_mask() -> None:
    """An operand that nothing is sent for: the ranks find out when they read the result."""
    (shardwise.ones(0, 4, WIDTH) * own(4, WIDTH)).sum().item()


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        (
            a_batch,
            r"linear \(.*test_plain_values.py:\d+\): argument 'input' .*rank 1 it differs from that on rank 0",
        ),
        (a_large_batch, r"linear .*argument 'input'"),
        (a_batch_of_unequal_size, r"linear .*argument 'input' .*it is \(3, 6\) on rank 0, \(5, 6\) on rank 1"),
        (labels, r"cross_entropy .*argument 'target'"),
        (a_mask, r"mul.*argument 'other'"),
    ],
    ids=["a batch", "a large batch", "unequal sizes", "labels", "a mask"],
)
@ranks(2, fresh=True)
def test_mistakes(mistake: Callable[[], None], text: str) -> None:
    """All ranks raise the same, and are told of `from_local`."""
    with impatient(), pytest.raises(PlainValueError, match=f"{text}.*from_local"):
        mistake()


@ranks(2, fresh=True)
def test_only_the_first_calls_are_compared() -> None:
    """From then on nothing is read. With ``values=False`` nothing is from the beginning."""
    w = shardwise.ones(0, 4, WIDTH)
    for _ in range(3):
        w * torch.ones(4, WIDTH)
    w * own(4, WIDTH)
    shardwise.check()
    with shardwise.validation(values=False):
        w + own(4, WIDTH)
    shardwise.check()
    with impatient(), pytest.raises(PlainValueError):
        subtract(w, own(4, WIDTH))


def subtract(w: torch.Tensor, plain: torch.Tensor) -> None:
    """And compare."""
    torch.sub(w, plain)
    shardwise.check()


@ranks(2, fresh=True)
def test_values_that_differ_by_rounding_are_the_same() -> None:
    """As ranks on devices of other kinds compute them."""
    torch.manual_seed(0)
    w = shardwise.ones(0, 64, WIDTH)
    for step in range(8):
        x = torch.randn(64, WIDTH, dtype=torch.float64)
        noisy = (x * (1 + 1e-7 * dist.get_rank())).float()
        getattr(torch, ("mul", "add", "sub", "maximum", "minimum", "hypot", "atan2", "fmod")[step])(w, noisy)
    shardwise.check()


@ranks(2, fresh=True)
def test_ranks_that_are_in_step_after_an_error() -> None:
    """One rank raised before its call was counted: from then on all count anew."""
    w, plain = shardwise.ones(0, 4, WIDTH), torch.ones(4, WIDTH)
    with impatient(), pytest.raises(RuntimeError):
        one_fails(w, plain)
    for _ in range(5):
        (w * plain).sum().item()


def one_fails(w: torch.Tensor, plain: torch.Tensor) -> None:
    """Rank 1 alone."""
    if dist.get_rank() == 1:
        torch.cat([w, torch.ones(3, 1, 1)])  # of other sizes
    (w * plain).sum().item()


@ranks(2, fresh=True)
def test_modes_of_one_rank() -> None:
    """A device as a context is a mode of torch's functions: calls go another way, and are counted alike."""
    w, plain = shardwise.ones(0, 4, WIDTH), torch.ones(4, WIDTH)
    for _ in range(5):
        with torch.device("cpu") if dist.get_rank() == 0 else nullcontext():
            (w * plain).sum().item()


@ranks(2, fresh=True)
def test_what_is_not_read_is_not_compared() -> None:
    """What is written into, and operands that give their size or dtype only."""
    w, buffer = shardwise.ones(0, 4, WIDTH), own(4, WIDTH)
    for row in range(4):
        buffer[row] = w[row]
    buffer.fill_(w.sum())
    w.type_as(buffer)
    w.sum(0).expand_as(own(4, WIDTH))
    assert torch.equal(buffer, torch.full((4, WIDTH), 4.0 * WIDTH))
    shardwise.check()


def test_fingerprints() -> None:
    """Other values have others, whatever their dtype and memory; the same values have the same."""
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.complex64):
        found = {fingerprint(torch.randn(50, 3, dtype=dtype)) for _ in range(50)}
        assert len(found) > 25, dtype
    found = {fingerprint(torch.randint(9, (50,))) for _ in range(50)}
    assert len(found) == 50
    x = torch.randn(40, 50)
    assert fingerprint(x) == fingerprint(x.T.contiguous().T)
    assert fingerprint(torch.full((3,), torch.nan)) == fingerprint(torch.full((3,), torch.nan))
    assert fingerprint(torch.zeros(0, 3)) == ""
    masks = [torch.finfo(torch.float64).min * torch.randint(2, (40,), dtype=torch.float64) for _ in range(2)]
    assert fingerprint(masks[0]) != fingerprint(masks[1])
    assert fingerprint(torch.tensor([True, False])) != fingerprint(torch.tensor([True, True]))
