"""Random numbers for the shards of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise import random
from shardwise.process_group import is_member
from shardwise.random import Draw
from shardwise.sharded_tensor.frame import Frame
from shardwise.sharded_tensor.replicas import make_alike


def draw_for(
    frame: Frame, tensors: Sequence[torch.Tensor], draw: Draw, generator: torch.Generator | None = None
) -> None:
    """Fill local tensors of this frame. Every rank of the group calls it; replicas are drawn alike."""
    group = frame.process_group
    if group is not None and not is_member(group):
        return
    device = tensors[0].device if tensors else frame.device
    random.fill(
        draw,
        frame.layout,
        frame.rows,
        tensors,
        device=device,
        dtype=frame.dtype,
        process_group=group,
        generator=generator,
    )
    if random.draws_apart(group):
        make_alike(frame.layout, tensors, frame.dtype, group)
