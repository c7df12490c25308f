"""Local tensors of a rank in a transfer: views of pieces, and the memory of what can travel as it lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwise.transfer.messages import Message, Spot
from shardwise.transfer.views import as_bytes


class LocalMemory:
    """The local tensors of one layout; whether one can be sent from, or received into, is asked once for each."""

    def __init__(self, tensors: Sequence[torch.Tensor], fits: Callable[[torch.Tensor], bool]) -> None:
        self._tensors, self._fits = [tensor.detach() for tensor in tensors], fits
        self._bytes: dict[int, torch.Tensor | None] = {}

    def view(self, spot: Spot) -> torch.Tensor:
        """A piece."""
        local = self._tensors[spot.local]
        return local[spot.slices] if spot.slices else local

    def views(self, message: Message) -> list[torch.Tensor]:
        """All pieces of a message."""
        return [self.view(spot) for spot in message.spots]

    def run(self, message: Message) -> torch.Tensor | None:
        """The bytes of a message, if they are one run of memory that can travel as it lies."""
        if len(message.spots) != 1:
            return None
        spot = message.spots[0]
        whole = self._whole(spot.local)
        if whole is None:  # a piece of a tensor that lies apart may be whole itself
            view = self.view(spot) if spot.slices else None
            return as_bytes(view) if view is not None and self._fits(view) else None
        if not spot.slices:
            return whole
        if spot.run is None:
            return None
        size = self._tensors[spot.local].element_size()
        return whole[spot.run.start * size : spot.run.stop * size]

    def _whole(self, local: int) -> torch.Tensor | None:
        if local not in self._bytes:
            tensor = self._tensors[local]
            self._bytes[local] = as_bytes(tensor) if self._fits(tensor) else None
        return self._bytes[local]
