"""`picture_of`: the picture of whatever has a layout, or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import SignatureError
from shardwise.layout.pictures.module_picture import module_picture
from shardwise.layout.pictures.picture import WIDTH, Picture


def picture_of(
    what: Any, size: Sequence[int] | None = None, *, dtype: torch.dtype | None = None, width: int = WIDTH
) -> Picture:
    """The picture of a layout, a sharded tensor, a transfer of one or of a state, a module, or a spec for this size.

    `shardwise.draw` draws sharding plans, too.
    """
    if isinstance(what, nn.Module):
        return module_picture(what, width=width)
    if hasattr(what, "_picture_"):
        picture: Picture = what._picture_(dtype=dtype, width=width)
        return picture
    kind = type(what).__name__
    if not callable(getattr(what, "layout", None)):
        raise SignatureError(
            "layouts, sharded tensors, transfer plans, modules, specs with a size and sharding plans with a module can "
            f"be drawn, found a {kind}"
        )
    if size is None:
        raise SignatureError(f"a {kind} is a rule for any size: say which to draw, as draw(spec, (1000, 64))")
    return picture_of(what.layout(size), dtype=dtype, width=width)
