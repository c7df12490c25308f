"""Protocols of what can be drawn. The classes themselves are in layers above, and ask for their own picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from shardwise.layout.geometry import Boxes, IntArray

if TYPE_CHECKING:
    from shardwise.layout.layout import Layout


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
    def src(self) -> Layout:
        """Before."""

    @property
    def dst(self) -> Layout:
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

    _layout: Layout
    dtype: torch.dtype
