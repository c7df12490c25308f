"""Threads that work for another one: what they take over from it, and how long it waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch


def as_here() -> Callable[[], AbstractContextManager[object]]:
    """A context for another thread, in which the current device and stream are those of this one now: torch keeps them
    for each thread."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # so nothing is on a GPU
        return nullcontext
    stream = torch.cuda.current_stream()
    return lambda: torch.cuda.stream(stream)


def within(limit: float, work: Callable[[], object], late: Callable[[], object]) -> None:
    """Do what may never end; after so many seconds a TimeoutError. The thread is left to it then, and if it comes to an
    end all the same, does what is to be done late."""
    context, lock = as_here(), threading.Lock()
    left = over = False
    failed: list[BaseException] = []

    def run() -> None:
        nonlocal over
        with context():
            try:
                work()
            except BaseException as error:  # whoever waits raises it
                failed.append(error)
            with lock:
                over = True
            if left:
                late()

    thread = threading.Thread(target=run, name="shardwise, within a limit", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # there are too many threads, or the process is about to end
        run()
    else:
        try:
            thread.join(limit)
        finally:  # also if it is interrupted
            with lock:
                left = not over
    if left:
        raise TimeoutError(f"timed out after {limit:g} s")
    if failed:
        raise failed[0]
