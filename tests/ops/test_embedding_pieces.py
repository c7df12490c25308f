"""Parts of a matrix that travel, small or large: what is packed is unpacked to the same."""

from __future__ import annotations

from unittest import mock

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.layout.grids import layouts

from shardwise.layout import Layout
from shardwise.ops.embedding import pieces as embedding_pieces
from shardwise.ops.embedding.pieces import MatrixPieces

CPU = torch.device("cpu")


@given(st.tuples(st.integers(0, 6), st.integers(1, 5)).flatmap(layouts), st.booleans(), st.data())
def test_pieces_are_packed_one_after_another(layout: Layout, picked: bool, data: st.DataObject) -> None:
    """By copies and by picking elements, in any order, and whole rows without columns too."""
    order = np.array(data.draw(st.permutations(layout.once.boxes.filled.tolist())), dtype=np.int64)
    boxes, shape = layout.once.boxes.take(order), (layout.size[0], layout.size[1])
    matrix = torch.arange(layout.size.numel(), dtype=torch.float64).view(shape)
    (tops, lefts), (bottoms, rights) = boxes.offsets.T, boxes.ends.T
    expected = torch.cat([matrix[:0].reshape(-1), *(matrix[boxes.index(row)].reshape(-1) for row in range(len(boxes)))])
    with mock.patch.object(embedding_pieces, "FEW_PIECES", 0 if picked else 10**9):
        made = [MatrixPieces(shape, (tops, bottoms), (lefts, rights))]
        if not layout.cuts(1):
            made.append(MatrixPieces(shape, (tops, bottoms)))
        for pieces in made:
            packed = pieces.pack(matrix, CPU).reshape(-1)
            assert torch.equal(packed, expected)
            assert torch.equal(pieces.unpack(packed, CPU), matrix)
