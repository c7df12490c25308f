"""What can be drawn, as pictures see it. The things themselves are in layers above, and ask for their own picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from shardwise.geometry import Boxes, IntArray


class Place(Protocol):
    """A device on a rank."""

    @property
    def rank(self) -> int | None:
        """The rank; None where a place names none."""

    @property
    def device(self) -> torch.device:
        """The device."""


class Places(Protocol):
    """Where boxes lie."""

    @property
    def distinct(self) -> tuple[Sequence[Place], IntArray]:
        """Each place once, and for each box the number of its place."""


class LayoutLike(Protocol):
    """Boxes on ranks for one size."""

    @property
    def size(self) -> torch.Size:
        """The size of the tensor."""

    @property
    def boxes(self) -> Boxes:
        """All boxes."""

    @property
    def ranks(self) -> IntArray:
        """The rank of each; -1 where a place names none."""

    @property
    def places(self) -> Places:
        """The place of each."""

    def place(self, row: int) -> Place:
        """The place of one."""

    def __len__(self) -> int: ...


class PiecesLike(Protocol):
    """What one rank sends or receives."""

    @property
    def boxes(self) -> Boxes:
        """Each piece."""

    @property
    def peers(self) -> IntArray:
        """The rank at the other end of each."""


class PlanLike(Protocol):
    """What must go where between two layouts."""

    @property
    def src(self) -> LayoutLike:
        """Before."""

    @property
    def dst(self) -> LayoutLike:
        """After."""

    @property
    def ranks(self) -> list[int]:
        """All ranks that hold a box before or after."""

    @property
    def moved(self) -> int:
        """Elements that travel between ranks."""

    def sends(self, rank: int) -> PiecesLike:
        """What a rank has for others and for itself."""

    def receives(self, rank: int) -> PiecesLike:
        """What a rank gets from others and from itself."""


@runtime_checkable
class Sharded(Protocol):
    """A tensor that has a layout."""

    _layout: LayoutLike
    dtype: torch.dtype
