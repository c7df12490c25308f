"""What a thread that works for another one takes over from it: torch keeps a current stream for each thread."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch


def as_here() -> Callable[[], AbstractContextManager[object]]:
    """A context for another thread, in which the current device and stream are those of this one now."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # so nothing is on a GPU
        return nullcontext
    stream = torch.cuda.current_stream()
    return lambda: torch.cuda.stream(stream)
