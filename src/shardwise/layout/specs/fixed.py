"""`FixedShardingSpec`: exactly this layout, for exactly this size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from shardwise.errors import SpecError
from shardwise.layout.checks import parse_size
from shardwise.layout.geometry import Boxes
from shardwise.layout.layout import Layout
from shardwise.layout.placement import PlacementLike
from shardwise.layout.specs.spec import LayoutShardingSpec


class FixedShardingSpec(LayoutShardingSpec):
    """Any boxes, of which some may lie on several ranks: the spec of results that no other spec describes."""

    def __init__(
        self,
        size: Sequence[int],
        offsets: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
        placements: Sequence[PlacementLike],
    ) -> None:
        boxes = Boxes.parse(offsets, sizes, len(size))
        self._layout = Layout.checked(parse_size(size), boxes, placements, boxes.describe, replicas=True)

    @classmethod
    def of(cls, layout: Layout) -> Self:
        """The spec that makes this layout."""
        self = cls.__new__(cls)
        self._layout = layout
        return self

    def layout(self, size: Sequence[int]) -> Layout:
        """The layout, when it is for this size."""
        if parse_size(size) != self._layout.size:
            raise SpecError(f"this spec is for size {tuple(self._layout.size)} only, and was asked for {tuple(size)}")
        return self._layout

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FixedShardingSpec) and self._layout == other._layout

    def __hash__(self) -> int:
        return hash(self._layout)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._layout!r})"

    def _plain_arguments(self) -> tuple[Any, ...]:
        layout = self._layout
        places = [str(place) for place in layout.places]
        return list(layout.size), layout.all_record_offsets.tolist(), layout.boxes.sizes.tolist(), places
