"""Ends a rank that waits for what never comes, or works without end, so that the report goes on."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from pathlib import Path
from types import TracebackType

PATIENCE = 60.0  # seconds without work after which a rank is taken to hang
WORK = 0.3  # seconds of processor time that count as work
MOST_WORK = 20.0  # seconds of processor time after which a rank is taken never to end
EXIT_CODE = 86


class Watch:
    """While entered, ends this process once it has idled or worked for long; leaves its stack in a file.

    A machine may be busy with other things: so it is the processor time of this process that is watched. Between
    `pause` and `resume` it may wait, since another rank may have more to do; `resume` begins a new piece of work.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._thread = file, threading.get_ident()
        self._over, self._paused, self._begin = threading.Event(), False, time.process_time()
        self._watcher = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._watcher.join()

    def pause(self) -> None:
        """This rank waits for the others, and knows it."""
        self._paused = True

    def resume(self) -> None:
        """It goes on."""
        self._paused, self._begin = False, time.process_time()

    def _run(self) -> None:
        worked, since = time.process_time(), time.monotonic()
        while not self._over.wait(0.5):
            if self._paused or time.process_time() - worked > WORK:
                worked, since = time.process_time(), time.monotonic()
            elif time.monotonic() - since > PATIENCE:
                self._end("waits")
            if not self._paused and time.process_time() - self._begin > MOST_WORK:
                self._end("works without end")

    def _end(self, what: str) -> None:
        """End the process, and tell where it is, innermost call last."""
        stack = traceback.extract_stack(sys._current_frames()[self._thread])
        ours = [frame for frame in stack if "/benchmarks/" not in frame.filename]
        place = " > ".join(f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in ours[-5:])
        self._file.write_text(f"{what} at {place}")
        os._exit(EXIT_CODE)
