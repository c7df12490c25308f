"""How tests wait: for what must happen, however long it takes on a machine that is busy."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENT = 600.0  # seconds after which a test is lost; nothing else depends on it


def until(happened: Callable[[], object]) -> None:
    """Ask again and again whether something has happened, until it has."""
    end = time.monotonic() + PATIENT
    while not happened():
        assert time.monotonic() < end, "what the test waits for does not happen"
        time.sleep(0.005)
