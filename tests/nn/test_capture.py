"""Captured steps where there is no CUDA device; `tests/gpu/test_capture.py` captures them."""

from __future__ import annotations

import pytest
import torch

import shardwise
from shardwise.errors import CaptureError


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("warm_up", [0, 3])
def test_without_a_device_the_error_says_what_to_do(warm_up: int) -> None:
    """At the first call, before anything is computed."""
    calls: list[int] = []
    step = shardwise.capture(calls.append, warm_up=warm_up)
    with pytest.raises(CaptureError, match="no CUDA device: call the step itself"):
        step(1)
    assert calls == []
