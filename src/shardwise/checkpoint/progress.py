"""A bar that shows bytes and rates, on the rank that asks for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from shardwise.errors import CheckpointError


class Progress:
    """A context in which a bar counts bytes; it needs rich, the extra ``cli``."""

    def __init__(self, what: str, total: int) -> None:
        self.require()
        from rich import progress as bars
        from rich.console import Console

        self._bar: Any = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.DownloadColumn(binary_units=True),
            bars.TransferSpeedColumn(),
            bars.TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task(what, total=total)

    @staticmethod
    def require() -> None:
        """Raise where it is not installed; to be called where all ranks fail together."""
        if find_spec("rich") is None:
            raise CheckpointError("a progress bar needs rich: pip install shardwise[cli]")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, count: int) -> None:
        """So many bytes more are done."""
        self._bar.advance(self._task, count)

    def counted(self, stretches: Iterable[Any]) -> Iterator[Any]:
        """The same stretches, counted as they go by."""
        for stretch in stretches:
            self.advance(stretch[0].nbytes)
            yield stretch


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
