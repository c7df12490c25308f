"""Work that may never end, done within a limit."""

from __future__ import annotations

import threading

import pytest
from tests.patience import PATIENT

from shardwise.state_transfer.threads import within


def test_what_ends_in_time_is_as_if_done_here() -> None:
    """Its error is raised here, too, and nothing is done late."""
    done: list[str] = []

    def fail() -> None:
        raise ZeroDivisionError("of the work")

    within(PATIENT, lambda: done.append("work"), late=lambda: done.append("late"))
    with pytest.raises(ZeroDivisionError, match="of the work"):
        within(PATIENT, fail, late=lambda: done.append("late"))
    assert done == ["work"]


@pytest.mark.parametrize("fails", [False, True])
def test_what_does_not_end_in_time_is_left_and_tidies_up_after_itself(fails: bool) -> None:
    """Whether it ends well or not."""
    going_on, tidied = threading.Event(), threading.Event()

    def work() -> None:
        going_on.wait(PATIENT)
        if fails:
            raise ZeroDivisionError

    with pytest.raises(TimeoutError, match=r"after 0\.05 s"):
        within(0.05, work, late=tidied.set)
    assert not tidied.is_set()
    going_on.set()
    assert tidied.wait(PATIENT)


def test_without_threads_it_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a process is about to end."""
    done: list[str] = []

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    within(PATIENT, lambda: done.append(threading.current_thread().name), late=lambda: done.append("late"))
    assert done == ["MainThread"]


def test_what_is_left_by_an_interruption_tidies_up_after_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As what takes too long."""
    going_on, tidied = threading.Event(), threading.Event()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            within(PATIENT, lambda: going_on.wait(PATIENT), late=tidied.set)
    going_on.set()
    assert tidied.wait(PATIENT)
