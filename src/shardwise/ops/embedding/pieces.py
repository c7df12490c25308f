"""`MatrixPieces`: the parts of a matrix that go to one rank after another, packed and unpacked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from shardwise.comm.transfer.views import copy
from shardwise.layout.geometry import IntArray
from shardwise.layout.grid import runs

Spans = tuple[IntArray, IntArray]  # begins and ends

# Many small pieces are picked by the indices of their elements, which is faster than a copy for each.
FEW_PIECES = 16
SMALL_PIECE = 256  # elements, on average


def pack_views(views: Sequence[torch.Tensor], dtype: torch.dtype, wire: torch.device) -> torch.Tensor:
    """The elements of all views in one buffer; a single view as it is."""
    if len(views) == 1:
        return views[0]
    sizes = [view.numel() for view in views]
    buffer = torch.empty(sum(sizes), dtype=dtype, device=wire)
    for part, view in zip(torch.split_with_sizes(buffer, sizes), views, strict=True):
        copy(part.view(view.shape), view)
    return buffer


class MatrixPieces:
    """Boxes of a matrix with these rows and columns, by default all columns."""

    def __init__(self, shape: tuple[int, int], rows: Spans, columns: Spans | None = None) -> None:
        self._shape, (self._tops, self._bottoms), self._columns = shape, rows, columns

    @cached_property
    def _is_whole(self) -> bool:
        """Whether the pieces, one after the other, are the matrix in its order."""
        if self._columns is not None or not len(self._tops):
            return self._columns is None and not self._shape[0]
        ends = self._tops[0] == 0 and self._bottoms[-1] == self._shape[0]
        return bool(ends and (self._tops[1:] == self._bottoms[:-1]).all())

    @cached_property
    def _spans(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """Begins and ends in both dims."""
        columns = self._columns or (np.zeros_like(self._tops), np.full_like(self._tops, self._shape[1]))
        return self._tops, self._bottoms, *columns

    @cached_property
    def _sizes(self) -> IntArray:
        tops, bottoms, lefts, rights = self._spans
        return (bottoms - tops) * (rights - lefts)

    @cached_property
    def _are_picked(self) -> bool:
        """Whether there are many small pieces."""
        return len(self._sizes) > FEW_PIECES and int(self._sizes.sum()) < SMALL_PIECE * len(self._sizes)

    @cached_property
    def _positions(self) -> IntArray:
        """The position in the flat matrix of each element of each piece."""
        tops, bottoms, lefts, rights = self._spans
        piece, row = runs(tops, bottoms)
        begins = row * self._shape[1]
        return runs(begins + lefts[piece], begins + rights[piece])[1]

    def pack(self, matrix: torch.Tensor, wire: torch.device) -> torch.Tensor:
        """The elements of all pieces, one after the other."""
        if self._is_whole:
            return matrix
        if self._are_picked:
            return matrix.reshape(-1).index_select(0, torch.from_numpy(self._positions).to(matrix.device))
        return pack_views(self._views(matrix), matrix.dtype, wire)

    def unpack(self, taken: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The matrix that consists of the pieces."""
        if self._is_whole:
            return taken.view(self._shape).to(device)
        if self._are_picked:
            order = np.empty_like(self._positions)
            order[self._positions] = np.arange(len(order))
            return taken.to(device).index_select(0, torch.from_numpy(order).to(device)).view(self._shape)
        matrix = torch.empty(self._shape, dtype=taken.dtype, device=device)
        for view, part in zip(self._views(matrix), torch.split_with_sizes(taken, self._sizes.tolist()), strict=True):
            copy(view, part.view(view.shape))
        return matrix

    def _views(self, matrix: torch.Tensor) -> list[torch.Tensor]:
        spans = zip(*(span.tolist() for span in self._spans), strict=True)
        return [matrix[top:bottom, left:right] for top, bottom, left, right in spans]
