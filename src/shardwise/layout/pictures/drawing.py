"""`draw`: the picture of whatever can be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import SignatureError
from shardwise.layout.pictures.module_picture import module_picture
from shardwise.layout.pictures.picture import WIDTH, Picture


def draw(
    what: Any, size: Sequence[int] | None = None, *, dtype: torch.dtype | None = None, width: int = WIDTH
) -> Picture:
    """The picture of a layout, a sharded tensor, a transfer of one or of a state, a module, or a spec for this size.

    A notebook shows it, ``print`` prints it, ``save("layout.svg")`` writes it to a file, no broader than ``width``
    pixels. A tensor knows its dtype; with that of a layout, spec or plan given, amounts are in bytes, else in elements.
    Every rank can draw alone: nothing travels. For what cannot be drawn, or a spec without a size, it raises a
    `SignatureError`. ::

        >>> from shardwise import ChunkShardingSpec
        >>> print(draw(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), (5, 4)).text(width=24))
        5x4, 20 elements in 2 shards
          dim 0 ↓  dim 1 →
          ┌──────────────────┐
          │      rank 0      │
          ├──────────────────┤
          │      rank 1      │
          └──────────────────┘
          rank:0/cpu    1 shard                   12   60% ████████████
          rank:1/cpu    1 shard                    8   40% ████████
    """
    if isinstance(what, nn.Module):
        return module_picture(what, width=width)
    if hasattr(what, "_picture_"):
        picture: Picture = what._picture_(dtype=dtype, width=width)
        return picture
    kind = type(what).__name__
    if not callable(getattr(what, "layout", None)):
        raise SignatureError(f"layouts, sharded tensors, plans, modules and specs can be drawn, found a {kind}")
    if size is None:
        raise SignatureError(f"a {kind} is a rule for any size: say which to draw, as draw(spec, (1000, 64))")
    return draw(what.layout(size), dtype=dtype, width=width)
