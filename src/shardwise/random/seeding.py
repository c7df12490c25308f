"""`layout_independent`: a seed for the calls of one context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def layout_independent(seed: int) -> Iterator[torch.Generator]:
    """Within this context, torch's generators have this seed; afterwards they go on as if nothing had been drawn.

    Random sharded tensors have the same global values for any spec and any number of ranks, here as everywhere. Every
    rank enters the context with the same seed, and makes the same tensors in the same order. Nothing travels::

        >>> with shardwise.layout_independent(seed=0):
        ...     rows = shardwise.rand(0, 4, 4)
        >>> with shardwise.layout_independent(seed=0):
        ...     columns = shardwise.rand(1, 4, 4)
        >>> torch.equal(rows.full_tensor(), columns.full_tensor())
        True
    """
    on_device = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # torch's
    devices = [torch.cuda.current_device()] if on_device else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield torch.default_generator
