"""Ranks that disagree on NCCL, where the host waits for headers by asking, and a backward runs in other threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise import ChunkShardingSpec, check, validation
from shardwise.comm.agreement.steps import notify_if_alone
from shardwise.comm.group import backend
from shardwise.errors import RankMismatchError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PLACES = [f"rank:{rank}/cuda:0" for rank in range(2)]
ROWS, COLUMNS = ChunkShardingSpec(0, PLACES), ChunkShardingSpec(1, PLACES)
PLAIN = torch.arange(16.0).reshape(4, 4)


def leaf(dtype: torch.dtype = torch.float32) -> Any:
    """A tensor in rows."""
    return shard_tensor(PLAIN.to("cuda:0", dtype), ROWS)


@ranks(2, backend="nccl")
def test_other_dtypes_and_skipped_backwards_are_found_out() -> None:
    """On both ranks, and then they are in step again."""
    odd = dist.get_rank() == 1
    one, other = leaf(), leaf(torch.int32)
    with pytest.raises(RankMismatchError, match="dtype"):
        (other if odd else one).full_tensor()
    one.requires_grad_()
    result = (one * 2).redistribute(COLUMNS)
    with validation(strict=True), pytest.raises(RankMismatchError, match="a transfer in the backward"):
        _ = one.full_tensor() if odd else result.backward(torch.ones_like(result))
    result = (one * 2).redistribute(COLUMNS)
    one.grad = None
    result.backward(torch.ones_like(result))
    assert torch.equal(one.grad.full_tensor().cpu(), torch.full_like(PLAIN, 2))


@ranks(2, backend="nccl")
def test_an_error_of_one_rank_alone_reaches_the_other() -> None:
    """Who waits for it in a header, which is completed later."""
    one = leaf()
    if dist.get_rank() == 1:
        notify_if_alone(dist.group.WORLD, ZeroDivisionError("alone"))
    else:
        with pytest.raises(ZeroDivisionError, match="found on rank 1"):
            one.full_tensor()
    assert torch.equal(one.full_tensor().cpu(), PLAIN)


@ranks(2, backend="nccl")
def test_ops_that_differ_are_found_out_by_the_watchdog_or_at_the_next_meeting() -> None:
    """Though no header was sent, and nobody waits on the host; no wrong value survives."""
    group = dist.new_group([0, 1])
    one = shard_tensor(PLAIN.to("cuda:0"), ROWS, process_group=group)

    def differ() -> None:
        # CUDA loads a kernel when it is first called, and waits for all that is under way: also for what never ends.
        _ = one.softmax(0) if dist.get_rank() else one @ one.t()
        check(group)

    with pytest.raises(RankMismatchError, match=r"out of step: rank 0 .* rank 1"):
        differ()


@ranks(2, backend="nccl")
def test_in_large_groups_digests_are_reduced() -> None:
    """With the same errors, in the forward and in the backward."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "MOST_EACH", 1)
        for test in (
            test_other_dtypes_and_skipped_backwards_are_found_out,
            test_an_error_of_one_rank_alone_reaches_the_other,
        ):
            test.on_this_rank()
