"""Random numbers as an operand: a sharded tensor that is cut as another one is, drawn by position."""

from __future__ import annotations

import torch

from shardwise.ops.engine.compute import assemble
from shardwise.ops.engine.steps import Noise, done
from shardwise.random import Draw
from shardwise.sharded_tensor import ShardedTensorBase


def noise_like(
    tensor: ShardedTensorBase,
    draw: Draw,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> ShardedTensorBase:
    """A new tensor of random numbers, of the same size and layout. Every rank of the group calls it."""
    frame = tensor._frame if dtype is None else tensor._frame.with_dtype(dtype)
    return assemble(type(tensor), frame, done(Noise(draw, frame, generator)), [], records=False)
