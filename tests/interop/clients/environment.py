"""What torchrun would say to accelerate, said to the ranks of a pool, which are there already."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from accelerate.state import AcceleratorState, GradientState, PartialState  # type: ignore[import-untyped] # it has none


@contextmanager
def launched() -> Iterator[None]:
    """Within this context, accelerate finds the process group of the pool; what it remembers is forgotten."""
    said = {"ACCELERATE_USE_CPU": "true", "LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"], "OMP_NUM_THREADS": "1"}
    said |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # which nobody asks, for all have joined
    with mock.patch.dict(os.environ, said):
        try:
            yield
        finally:
            for state in (AcceleratorState, GradientState, PartialState):
                state._reset_state()
