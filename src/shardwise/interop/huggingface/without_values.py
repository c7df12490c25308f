"""What transformers asks the values of a batch for, answered where there are none: as for most batches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ASKED = "find_packed_sequence_indices"  # whether rows have several sequences: else no mask is made


@contextmanager
def answering_for_batches() -> Iterator[None]:
    """Within this context, rows have one sequence each, as far as nobody knows their values."""
    module: Any = sys.modules.get("transformers.masking_utils")
    ask = getattr(module, ASKED, None)
    if ask is None:
        yield
        return
    setattr(module, ASKED, lambda position_ids: None)
    try:
        yield
    finally:
        setattr(module, ASKED, ask)
