"""Routes: for each part of a target that a part of a source stands for, which pieces go from which rank to which.

Both sides, cut to that part and with the dims of the target, are layouts as any other, on the same ranks, with the same
rows; so each route is a transfer plan. Dims of the source that the target does not have come last, with one element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from shardwise.comm.transfer import TransferPlan
from shardwise.layout import Cut, Grid, Layout
from shardwise.layout.geometry import Boxes, IntArray
from shardwise.state_transfer.patches import Patch
from shardwise.state_transfer.sides import Tensor

Plans = dict[tuple[Layout, Layout], TransferPlan]  # one for all tensors that lie alike


@dataclass(frozen=True)
class Window:
    """A box of a tensor, whose dims come in another order: for each one of the window, one of the tensor, or a new
    dim of one element."""

    offsets: Sequence[int]
    sizes: Sequence[int]
    dims: Sequence[int | None]

    @property
    def size(self) -> torch.Size:
        """Of what is seen."""
        return torch.Size([1 if dim is None else self.sizes[dim] for dim in self.dims])

    def layout(self, layout: Layout) -> Layout:
        """The same rows on the same ranks, cut to what is seen: many are empty."""
        if tuple(self.dims) == tuple(range(layout.ndim)) and self.size == layout.size:
            return layout
        if isinstance(layout.pattern, Grid):
            place = {dim: at for at, dim in enumerate(self.dims) if dim is not None}

            def seen(dim: int, cut: Cut) -> tuple[int, Cut]:
                return place[dim], cut.clipped(self.offsets[dim], self.sizes[dim])

            return Layout.on_grid(layout.pattern.mapped(self.size, seen), layout.places)
        boxes, first = layout.boxes, np.array(self.offsets, dtype=np.int64)
        limit = np.array(self.sizes, dtype=np.int64)
        low, high = np.clip(boxes.offsets - first, 0, limit), np.clip(boxes.ends - first, 0, limit)
        offsets = np.zeros((len(layout), len(self.dims)), dtype=np.int64)
        sizes = np.ones((len(layout), len(self.dims)), dtype=np.int64)
        for at, dim in enumerate(self.dims):
            if dim is not None:
                offsets[:, at], sizes[:, at] = low[:, dim], (high - low)[:, dim]
        return Layout.of(self.size, Boxes(offsets, sizes), layout.places)

    def view(self, local: torch.Tensor, begin: Sequence[int]) -> torch.Tensor:
        """What is seen of a local box, which begins there in the tensor."""
        view = local
        for dim, (at, offset, size) in enumerate(zip(begin, self.offsets, self.sizes, strict=True)):
            low, high = max(offset - at, 0), min(offset + size - at, view.shape[dim])
            if high - low < view.shape[dim]:
                view = view.narrow(dim, low, high - low)
        view = view.permute([dim for dim in self.dims if dim is not None])
        for dim, found in enumerate(self.dims):
            if found is None:
                view = view.unsqueeze(dim)
        return view


@dataclass(frozen=True, eq=False)
class StateRoute:
    """A part of a source on its way to a part of a target."""

    source: str
    target: str
    patch: Patch
    windows: tuple[Window, Window]  # into the source, and into the target
    plan: TransferPlan
    dtype: torch.dtype  # in which it travels: the narrower one

    @cached_property
    def itemsize(self) -> int:
        """Bytes of an element on its way."""
        return self.dtype.itemsize


def routes_of(
    target: str,
    patches: Sequence[Patch],
    sources: Mapping[str, Tensor],
    into: Tensor,
    hosts: IntArray | None,
    plans: Plans,
) -> list[StateRoute]:
    """The routes into one target."""
    found = []
    for patch in patches:
        assert patch.source is not None  # zeros take no route
        source = sources[patch.source]
        assert source.dtype is not None
        wider = into.dtype is not None and source.dtype.itemsize > into.dtype.itemsize
        dtype = into.dtype if wider and into.dtype is not None else source.dtype
        dropped = [dim for dim in range(len(patch.sizes)) if dim not in patch.dims]
        windows = (
            Window(patch.offsets, patch.sizes, (*patch.dims, *dropped)),
            Window(patch.at, patch.extents, (*range(len(patch.at)), *(None for _ in dropped))),
        )
        both = windows[0].layout(source.layout), windows[1].layout(into.layout)
        plan = plans.get(both)
        if plan is None:
            plan = plans[both] = TransferPlan(*both, hosts=hosts)
        found.append(StateRoute(patch.source, target, patch, windows, plan, dtype))
    return found
