"""Ranks that die, and what the others find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from tests.patience import PATIENT

from shardwise.testing import RankFailure, pool, run_on_ranks

WORLD = 4


@contextmanager
def all_are_heard() -> Iterator[None]:
    """Once a rank has failed, the pool waits for whatever the others find, however long they take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "GRACE", PATIENT)
        yield


def others_go_on(function: Callable[..., object], *args: object, dies: int, backend: str = "gloo") -> None:
    """Run it on four new ranks, one of which ends with exit code 1; it fails on no other, and ends long before the
    group's time limit."""
    with all_are_heard(), pytest.raises(RankFailure) as caught:
        run_on_ranks(WORLD, function, *args, fresh=True, backend=backend)
    told = str(caught.value)
    assert f"rank {dies} of {WORLD} failed:\nthe process ended with exit code 1, without a word" in told, told
    assert told.count(f" of {WORLD} ") == 1, told
