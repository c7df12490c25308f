"""Transfers by the backend's own collectives, by messages, and sums over replicas, as the plain tensor says."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.cases import ALL, SIZE, places
from tests.comm.transfer import carriers
from tests.comm.transfer.carriers import SAID

from shardwise import Layout, ReplicatedShardingSpec
from shardwise.comm.group.members import rank_array
from shardwise.comm.transfer import all_reduce, collectives, execute
from shardwise.comm.transfer.all_reduce import sum_replicas
from shardwise.comm.transfer.planned import PlannedTransfer
from shardwise.comm.transfer.recognise import recognised
from shardwise.layout import Axis, Cut, Places
from shardwise.testing import ranks


def forced(planned: PlannedTransfer) -> Any:
    """The carrier of NCCL, where gloo can do the same: it knows no lists of uneven tensors, and adds no 2-byte ints."""
    plan = planned.plan
    found = recognised(plan, rank_array(planned.group))
    if found is None or (found.root is None and not found.split[1]) or (plan.sums and planned.dtype == torch.int16):
        return None
    return collectives.carrier_of(found)


@ranks(4)
def test_collectives_move_and_add_up_as_messages_do() -> None:
    """All kinds of cuts and dtypes, in the whole group and in a part of it, out of order."""
    some = dist.new_group([3, 1])
    assert carriers.check("cpu", dist.group.WORLD)["two on each"] == "all-gather"
    with mock.patch.object(execute, "own_collective", forced):
        taken = carriers.check("cpu", dist.group.WORLD)
        assert (taken["grid"], taken["on one"]) == ("all-gather", "broadcast")
        if dist.get_rank() in (1, 3):
            carriers.check("cpu", some, dtypes=(torch.float32,))


@ranks(4)
def test_replicas_all_get_the_same_sum_in_few_bytes() -> None:
    """In one exchange and in two, for replicas on some ranks, beside other boxes, and twice on one rank."""
    here = dist.get_rank()
    layouts = [spec.layout(SIZE) for spec in (*ALL.values(), ReplicatedShardingSpec(places(3, 1)))]
    layouts += [
        Layout.by_rule(SIZE, axes, Places.of(places(0, 1, 2, 3)))
        for axes in ([Axis(2), Axis(2, 0, Cut.in_steps(7, 2, 0, 4))], [Axis(2, 1, Cut.in_steps(6, 2, 0, 3)), Axis(2)])
    ]
    layouts += [Layout.whole(SIZE, places(2, 0, 2)), Layout.whole((), places(0, 1, 2, 3))]
    for at_once in (0, 1 << 18):
        with mock.patch.object(all_reduce, "AT_ONCE", at_once):
            for layout in layouts:
                for dtype in (torch.float64, torch.bfloat16):
                    brought = torch.stack(
                        [torch.full(tuple(layout.size), 0.1 * (row + 1)) for row in range(len(layout))]
                    )
                    brought = brought.to(dtype)
                    mine = [brought[row][layout.index(row)] for row in layout.rows_on(here)]
                    sums = sum_replicas(layout, mine, dist.group.WORLD, dtype=dtype, said=SAID)
                    for row, one in zip(layout.rows_on(here), sums, strict=True):
                        _, holders = layout.pattern.holders(layout.pattern.first(torch.tensor([row]).numpy()))
                        expected = brought[holders].double().sum(0)[layout.index(row)]
                        rounding = torch.finfo(dtype).eps * float(expected.abs().max() if expected.numel() else 0)
                        assert torch.allclose(one.double(), expected, rtol=0, atol=rounding), (layout, dtype)
    bytes_sent: list[int] = []
    original = all_reduce.exchange_with_all

    def counted(group: Any, taken: Any, given: Any, *more: Any) -> Any:
        bytes_sent.append(sum(one.nbytes for one in given))
        return original(group, taken, given, *more)

    big = torch.rand(300_000, generator=torch.Generator().manual_seed(here))
    with mock.patch.object(all_reduce, "exchange_with_all", counted):
        (total,) = sum_replicas(
            Layout.whole(big.shape, places(0, 1, 2, 3)), [big], dist.group.WORLD, dtype=big.dtype, said=SAID
        )
    assert sum(bytes_sent) == 2 * big.nbytes * 3 // 4
    everyone = [torch.empty_like(total) for _ in range(4)]
    dist.all_gather(everyone, total)
    assert all(torch.equal(one, total) for one in everyone)  # bit for bit
