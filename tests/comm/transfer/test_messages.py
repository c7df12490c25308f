"""Messages of a rank: what they hold, seen from the local tensors, is what the pieces of the plan say."""

from __future__ import annotations

import numpy as np
import torch
from tests.cases import SIZE, SPECS, places

from shardwise import Layout
from shardwise.comm.transfer import make_plan
from shardwise.comm.transfer.messages import LocalMemory, messages_received, messages_sent

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
