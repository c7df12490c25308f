"""`Progress`: a bar of bytes and rates on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

from shardwise.errors import CheckpointError
from shardwise.layout.pictures.words import bytes_text

LEAST_PAUSE = 0.2  # seconds between two updates of the line


class Progress:
    """A context with a bar on stderr: that of rich, or else a line that is overwritten.

    A ``transient`` bar is erased at the end. Without ``enabled`` there is no bar.
    """

    def __init__(self, what: str, total: int, *, transient: bool = False, enabled: bool = True) -> None:
        self._bar: Any = (_rich_bar(what, total, transient) or _Line(what, total)) if enabled else None

    @staticmethod
    def require() -> None:
        """Raise where rich is not installed. Call it where all ranks fail together."""
        if find_spec("rich") is None:
            raise CheckpointError("a progress bar needs rich: pip install shardwise[cli]")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int) -> None:
        """Count bytes."""
        if self._bar is not None:
            self._bar.advance(0, count)  # the only task

    def counted(self, buffers: Iterable[Any]) -> Iterator[Any]:
        """The same buffers, counted as they are used."""
        for buffer in buffers:
            self.advance(buffer[0].nbytes)
            yield buffer


def _rich_bar(what: str, total: int, transient: bool) -> Any:
    """The bar of rich; None where rich is not installed."""
    try:
        from rich import progress as bars
        from rich.console import Console
    except ImportError:
        return None
    bar = bars.Progress(
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(binary_units=True),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=transient,
    )
    bar.add_task(what, total=total)
    return bar


class _Line:
    """A line with bytes and rate."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._done, self._shown = 0, 0.0

    def start(self) -> None:
        self._begun = time.monotonic()

    def advance(self, _: int, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._shown > LEAST_PAUSE:
            self._shown = now
            rate = self._done / max(now - self._begun, 1e-9)
            done, total = bytes_text(min(self._done, self._total)), bytes_text(self._total)
            sys.stderr.write(f"\r{self._what} {done} of {total}, {bytes_text(int(rate))}/s \x1b[K")
            sys.stderr.flush()

    def stop(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
