"""Work that may never end, in a thread that is waited for only so long."""

from __future__ import annotations

import threading
from collections.abc import Callable

from shardwise.comm.transfer.copies import as_here


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
        raise failed.pop()
