"""Delivery: pieces that arrive go into the target, into copies that replace it at the end, or to `on_arrival`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch.autograd.graph import increment_version

from shardwise.comm.transfer.segments import Piece
from shardwise.comm.transfer.views import view_of
from shardwise.state_transfer.planning import Options, Planned

Boxes = dict[int, torch.Tensor]  # local tensors by the row of the layout


class Delivery:
    """The targets of one rank, and what is done with pieces that arrive for them."""

    def __init__(self, planned: Planned, here: int, options: Options) -> None:
        self._planned, self._here, self._options = planned, here, options
        self._own = {name: planned.local_targets(name, here) for name in planned.made_of}
        self._copies: dict[str, Boxes] = {}  # of a staged transfer
        self._temporary: dict[str, Boxes] = {}  # boxes that are handed over, and not kept
        self._at_once = None in self._own.values() and not options.staged  # hands over a target when it is complete
        counts = np.bincount(planned.load.receives.plans, minlength=len(planned.routes)).tolist()
        self._expected: Counter[str] = Counter()  # pieces
        for route, count in zip(planned.routes, counts, strict=True):
            self._expected[route.target] += count
        self._missing: Counter[str] = Counter()
        self._begins: dict[tuple[str, int], list[int]] = {}  # where boxes of targets begin

    def is_fixed(self, piece: Piece) -> bool:
        """Whether a piece is put into the same memory in every run."""
        return self._own[self._planned.routes[piece.plan].target] is not None

    def prepare(self) -> None:
        """Make the copies of a staged transfer."""
        for name, own in self._own.items():
            if own is not None and self._options.staged:
                self._boxes(name)

    def begin(self) -> None:
        """Before a run."""
        if not self._options.staged:
            increment_version(self._changed)  # also if it fails in the middle
        self._missing = Counter(self._expected)
        self._temporary.clear()  # of a run that failed
        for name, boxes in self._planned.gaps.items():
            if self._own.get(name) is not None:
                self._zero(name, boxes.offsets.tolist(), boxes.sizes.tolist())

    def view(self, piece: Piece) -> torch.Tensor:
        """The place of a piece."""
        route = self._planned.routes[piece.plan]
        begin = self._begins.get((route.target, piece.row))
        if begin is None:
            begin = self._planned.targets[route.target].layout.at([piece.row]).offsets[0].tolist()
            self._begins[route.target, piece.row] = begin
        seen = route.windows[1].view(self._boxes(route.target)[piece.row], begin)
        return view_of(seen, piece.offsets, piece.sizes)

    def _boxes(self, name: str) -> Boxes:
        own = self._own[name]
        if own is not None and not self._options.staged:
            return own
        places = self._copies if own is not None else self._temporary
        found = places.get(name)
        if found is None:
            found = places[name] = self._made(name)
        return found

    def _made(self, name: str) -> Boxes:
        own, tensor = self._own[name], self._planned.targets[name]
        if own is not None:
            return {row: torch.zeros_like(local, memory_format=torch.contiguous_format) for row, local in own.items()}
        rows, dtype = tensor.layout.rows_on(self._here), self._planned.dtype_of(name)
        with torch.inference_mode(mode=False):
            made = [torch.zeros(tensor.layout.extent(row), dtype=dtype, device=self._device(name)) for row in rows]
        return dict(zip(rows, made, strict=True))

    def _device(self, name: str) -> torch.device:
        """The device of the bare layout that this rank gives; else the CPU."""
        given = self._planned.given[1].get(name)
        return torch.device("cpu") if given is None or given.layout is None else given.layout.some_device

    def _zero(self, name: str, offsets: Sequence[list[int]], sizes: Sequence[list[int]]) -> None:
        """Fill boxes that nothing is moved to."""
        layout = self._planned.targets[name].layout
        for row, local in self._boxes(name).items():
            box = layout.at([row])
            begin, end = box.offsets[0].tolist(), box.ends[0].tolist()
            for offset, size in zip(offsets, sizes, strict=True):
                low = [max(one, other) for one, other in zip(begin, offset, strict=True)]
                high = [min(one, o + s) for one, o, s in zip(end, offset, size, strict=True)]
                extent = [last - first for first, last in zip(low, high, strict=True)]
                if all(length > 0 for length in extent):
                    view_of(local, [at - first for at, first in zip(low, begin, strict=True)], extent).zero_()

    def arrived(self, pieces: Sequence[Piece]) -> None:
        """Pieces are in their place. A target without memory of its own is handed over after its last piece."""
        for piece in pieces if self._at_once else ():
            name = self._planned.routes[piece.plan].target
            self._missing[name] -= 1
            if not self._missing[name] and self._own[name] is None:
                self._hand_over(name)

    def _hand_over(self, name: str) -> None:
        boxes = self._boxes(name)
        del self._temporary[name]
        assert self._options.on_arrival is not None
        with torch.inference_mode(mode=False), torch.no_grad():
            self._options.on_arrival(name, list(boxes.values()))

    def hand_over(self) -> None:
        """All has arrived: hand over the targets that were not handed over piece by piece."""
        for name, own in self._own.items():
            if own is None and (self._options.staged or not self._expected[name]):
                self._hand_over(name)

    def finish(self) -> None:
        """All has arrived, of a staged transfer on all ranks: copy the copies into the target."""
        with torch.inference_mode():  # in which inference tensors can be written into, too
            for name, copies in self._copies.items():
                for row, local in (self._own[name] or {}).items():
                    local.copy_(copies[row])
        increment_version(self._changed)

    @cached_property
    def _changed(self) -> list[torch.Tensor]:
        """All tensors of the target that have a version, also those of which this rank has nothing."""
        changed = [local for own in self._own.values() if own is not None for local in own.values()]
        given = [self._planned.given[1][name].whole for name in self._own if name in self._planned.given[1]]
        changed += [whole for whole in given if whole is not None]
        return [tensor for tensor in changed if not tensor.is_inference()]
