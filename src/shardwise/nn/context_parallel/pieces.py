"""Where sequences are cut: into pieces that differ by one token at most, or in proportion to weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from shardwise.layout import Layout, Places
from shardwise.layout.geometry import Boxes


class RankGrid(NamedTuple):
    """Ranks in rows: those of a row have pieces of the same samples."""

    ranks: tuple[tuple[int, ...], ...]
    pieces: int  # of a rank
    weights: tuple[float, ...] | None  # of the ranks of a row

    def spans(self, length: int) -> list[tuple[int, int, int]]:
        """Begin, end and rank of the row of each piece of a sequence, in order.

        Ranks come in order, then in reverse order, and so on: with two pieces, a rank has the first and the last, the
        next one the second and the last but one. So each rank's queries see about as many keys before them.
        """
        count = len(self.ranks[0])
        order = [k if turn % 2 == 0 else count - 1 - k for turn in range(self.pieces) for k in range(count)]
        shares = np.ones(count) if self.weights is None else np.array(self.weights)
        ends = np.cumsum(shares[order]) / (shares.sum() * self.pieces)
        cuts = [0, *np.floor(ends * length + 1e-9).astype(np.int64).tolist()]
        cuts[-1] = length
        return [(begin, end, rank) for begin, end, rank in zip(cuts[:-1], cuts[1:], order, strict=True)]

    def layout(self, size: Sequence[int], samples: Sequence[int], dim: int, device_type: str) -> Layout:
        """Of a tensor whose dim 0 has so many samples for each row, and whose sequences lie along another dim."""
        offsets, extents, ranks = [], [], []
        first = 0
        for row, count in enumerate(samples):
            for begin, end, number in self.spans(size[dim]):
                offsets.append([first, *[0] * (len(size) - 1)])
                extents.append([count, *size[1:]])
                offsets[-1][dim], extents[-1][dim] = begin, end - begin
                ranks.append(self.ranks[row][number])
            first += count
        places = Places.on_ranks(np.array(ranks, dtype=np.int64), device_type)
        both = np.array(offsets, dtype=np.int64), np.array(extents, dtype=np.int64)
        return Layout.of(torch.Size([first, *size[1:]]), Boxes(*both), places)
