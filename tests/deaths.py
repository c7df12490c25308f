"""Ranks that die, and what the others find."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwise.testing import RankFailure, pool, run_on_ranks

WORLD = 4


def others_go_on(function: Callable[..., object], *args: object, dies: int, backend: str = "gloo") -> None:
    """Run it on four new ranks, one of which ends with exit code 1; it fails on no other, and ends long before the
    group's time limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "GRACE", 30.0)  # of a machine that is busy; far less than the time limit
        with pytest.raises(RankFailure) as caught:
            run_on_ranks(WORLD, function, *args, fresh=True, backend=backend)
    told = str(caught.value)
    assert f"rank {dies} of {WORLD} failed:\nthe process ended with exit code 1, without a word" in told, told
    assert told.count(f" of {WORLD} ") == 1, told
