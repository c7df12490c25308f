"""Messages of a rank: what they hold, seen from the local tensors, is what the pieces of the plan say."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import torch
import torch.distributed as dist
from tests.cases import SIZE, SPECS, chunks, places

from shardwise import Layout
from shardwise.comm.transfer import make_plan
from shardwise.comm.transfer import plan as plans
from shardwise.comm.transfer.messages import LocalMemory, messages_received, messages_sent
from shardwise.comm.transfer.planned import planned_transfer
from shardwise.testing import ranks

MEMBERS = np.array([2, 0, 3, 1])


def test_messages_lie_where_the_plan_says() -> None:
    """By view and by run of memory, for members out of order, both ways; what is the same is marked so."""
    whole = torch.arange(torch.Size(SIZE).numel()).view(SIZE)
    everywhere = Layout.whole(SIZE, places(0, 1, 2, 3))
    layouts = [*(spec.layout(SIZE) for spec in SPECS.values()), everywhere]
    runs = apart = 0
    for src in layouts:
        for plan in (make_plan(src, everywhere), make_plan(src, layouts[0]), make_plan(src, everywhere).reverse()):
            for rank in range(4):
                sent, due = messages_sent(plan, rank, MEMBERS), messages_received(plan, rank, MEMBERS)
                assert messages_sent(plan, rank, MEMBERS) is sent
                for messages, layout in ((sent, plan.src), (due, plan.dst)):
                    locals_ = [whole[layout.index(row)].contiguous() for row in layout.rows_on(rank)]
                    memory = LocalMemory(locals_, torch.Tensor.is_contiguous)
                    assert [one.member for one in messages.each] == sorted(one.member for one in messages.each)
                    for message in messages.each:
                        assert (message is messages.own) == (MEMBERS[message.member] == rank)
                        boxes = messages.pieces.chosen(message.run).boxes
                        wanted = [
                            whole[tuple(slice(o, o + s) for o, s in zip(low, size, strict=True))]
                            for low, size in zip(boxes.offsets.tolist(), boxes.sizes.tolist(), strict=True)
                        ]
                        views = memory.views(message)
                        assert all(torch.equal(one, other) for one, other in zip(views, wanted, strict=True))
                        assert message.elements == sum(one.numel() for one in wanted)
                        data = memory.run(message)
                        assert (data is not None) == (len(views) == 1 and views[0].is_contiguous())
                        if data is None:
                            apart += 1
                        else:
                            runs += 1
                            assert data.data_ptr() == views[0].data_ptr()
                            assert torch.equal(data, wanted[0].reshape(-1))
                        first = memory.views(messages.each[message.same])
                        if messages is sent:
                            assert all(a.data_ptr() == b.data_ptr() for a, b in zip(first, views, strict=True))
    assert runs
    assert apart


@ranks(2)
def test_messages_are_kept_as_long_as_the_pieces() -> None:
    """No longer: the memory of all pieces together is bounded."""
    assert dist.group.WORLD is not None
    wanted = make_plan(chunks(0, 0, 1).layout(SIZE), chunks(1, 0, 1).layout(SIZE))
    planned = planned_transfer(dist.group.WORLD, wanted, torch.float32)
    sent = weakref.ref(planned.sent)
    gc.collect()
    assert planned.sent is sent()
    for number in (0, 1):  # of the rank
        plans._kept_pieces._found.pop((wanted, number, True), None)
    gc.collect()
    assert sent() is None
    assert len(planned.sent.each) == 2
