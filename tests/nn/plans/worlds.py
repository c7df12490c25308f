"""Worlds in which plans are made and nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def world_of(ranks: int) -> Iterator[None]:
    """Within, this process is the first of so many ranks, the others of which are not there."""
    dist.init_process_group("fake", rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
