"""A bar that shows bytes and rates, on the rank that asks for it, and in the command line."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from shardwise.errors import CheckpointError
from shardwise.viz.words import bytes_text

LEAST_PAUSE = 0.2  # seconds between two lines


class Progress:
    """A context in which a bar on stderr counts bytes: that of rich, or else a line that is written again and again.

    One that is ``transient`` is not to be seen any more when it ends.
    """

    def __init__(self, what: str, total: int, *, transient: bool = False) -> None:
        self._bar: Any = _rich_bar(what, total, transient) or _Line(what, total)

    @staticmethod
    def require() -> None:
        """Raise where rich is not installed; to be called where all ranks fail together."""
        if find_spec("rich") is None:
            raise CheckpointError("a progress bar needs rich: pip install shardwise[cli]")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, count: int) -> None:
        """So many bytes more are done."""
        self._bar.advance(0, count)  # the first task, and the only one

    def counted(self, stretches: Iterable[Any]) -> Iterator[Any]:
        """The same stretches, counted as they go by."""
        for stretch in stretches:
            self.advance(stretch[0].nbytes)
            yield stretch


def _rich_bar(what: str, total: int, transient: bool) -> Any:
    """The bar of rich; None where that is not installed."""
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
    """What is done, the rate, and no bar."""

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


class _Silent(Progress):
    """No bar."""

    def __init__(self) -> None:
        pass

    def advance(self, count: int) -> None:
        """Nobody looks."""

    def counted(self, stretches: Iterable[Any]) -> Iterator[Any]:
        """The same stretches."""
        return iter(stretches)


@contextmanager
def silent() -> Iterator[Progress]:
    """A context without a bar."""
    yield _Silent()
