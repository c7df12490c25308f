"""Plans that know which ranks are on one host: what a host has, it gives to its own."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.comm.transfer.test_anywhere import specs

from shardwise import GridShardingSpec
from shardwise.comm.transfer import TransferPlan
from shardwise.layout import Layout
from shardwise.layout.geometry import Boxes, IntArray

WORLD = 6


@st.composite
def layouts(draw: st.DrawFn, size: tuple[int, ...]) -> Layout:
    """Any layout; often with replicas of its boxes."""
    if draw(st.booleans()):
        order = draw(st.permutations(range(WORLD)))
        rows = [[f"rank:{order[2 * row + column]}/cpu" for column in range(2)] for row in range(WORLD // 2)]
        dims = draw(st.sampled_from([(None, 0), (0, None), (None, 1), (1, None)]))
        return GridShardingSpec(dims, rows).layout(size)
    return draw(specs(size, range(WORLD))).layout(size)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_every_piece_comes_once_and_from_the_nearest_holder(data: st.DataObject) -> None:
    """From the rank itself, else from its host, else from anywhere; senders and receivers plan the same."""
    size = tuple(data.draw(st.lists(st.integers(1, 7), min_size=2, max_size=2)))
    src, dst = data.draw(layouts(size)), data.draw(layouts(size))
    hosts = np.array(data.draw(st.lists(st.integers(0, 2), min_size=WORLD, max_size=WORLD)), dtype=np.int64)
    plan = TransferPlan(src, dst, hosts=hosts)
    held = torch.zeros(WORLD, *size, dtype=torch.bool)
    for row, rank in enumerate(src.ranks.tolist()):
        held[rank][src.index(row)] = True
    sent = set()
    for rank in range(WORLD):
        pieces = plan.sends(rank)
        sent |= {(rank, *key) for key in keys(pieces.boxes, pieces.peers)}
    got = set()
    for rank in range(WORLD):
        pieces, count = plan.receives(rank), torch.zeros(size, dtype=torch.int64)
        near = held[torch.from_numpy(hosts == hosts[rank])].any(0)
        for number, peer in enumerate(pieces.peers.tolist()):
            box = pieces.boxes.index(number)
            count[box] += 1
            assert held[peer][box].all()
            if peer != rank:
                assert not held[rank][box].any()
                assert hosts[peer] == hosts[rank] or not near[box].any()
        wanted = torch.zeros(size, dtype=torch.int64)
        for row in dst.rows_on(rank):
            wanted[dst.index(row)] += 1
        assert torch.equal(count, wanted)
        got |= {
            (peer, key[0], rank)
            for peer, key in zip(pieces.peers.tolist(), keys(pieces.boxes, pieces.peers), strict=True)
        }
    assert sent == got


def keys(boxes: Boxes, peers: IntArray) -> list[tuple[object, int]]:
    """Each box and the rank at the other end."""
    every = zip(boxes.offsets.tolist(), boxes.sizes.tolist(), peers.tolist(), strict=True)
    return [((tuple(offsets), tuple(sizes)), peer) for offsets, sizes, peer in every]
