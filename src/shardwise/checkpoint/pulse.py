"""`Pulse`: signs of life that ranks give through the store while they save in the background.

A rank that waits for others would else wait for one that is gone as long as for one that writes slowly. A broken
connection does not tell them apart: a time limit that has passed breaks one, too, while the other rank writes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch.distributed import ProcessGroup

from shardwise.checkpoint.ranks import Ranks
from shardwise.meeting import ranks_gone
from shardwise.meeting.group import store_of

EVERY = 1.0  # seconds between two signs
AT_ONCE = 1000  # ranks of which a store takes one in a second
MISSED = 10  # so many in a row, of a rank to which the connection is broken: it is gone


class Pulse:
    """Of one save."""

    def __init__(self, ranks: Ranks, key: str) -> None:
        self._group: ProcessGroup | None = ranks.group if len(ranks.all) > 1 else None
        self._store: Any = None if self._group is None else store_of(self._group)
        self._here, self._key = ranks.here, key
        self.every = EVERY * max(1.0, len(ranks.all) / AT_ONCE)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._seen: dict[int, tuple[int, float]] = {}  # how many signs of a rank, and when the last one was found

    def begin(self) -> None:
        """Give signs, from a thread, until the end."""
        if self._group is not None:
            self._thread = threading.Thread(target=self._beat, name="shardwise pulse", daemon=True)
            with suppress(RuntimeError):  # there are too many threads
                self._thread.start()

    def _beat(self) -> None:
        given = False
        with suppress(RuntimeError):  # the store is gone, or cannot delete
            while not self._over.wait(self.every):
                given = self._store.add(self._sign(self._here), 1) > 0
            if given:
                self._store.delete_key(self._sign(self._here))

    def end(self) -> None:
        """Give no more signs."""
        self._over.set()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(self.every)

    def gone(self, ranks: Sequence[int]) -> list[int]:
        """Those of these ranks that have given no sign for long, and to which the connection is broken."""
        if self._group is None:
            return []
        now = time.monotonic()
        for rank in ranks:
            sign = self._sign(rank)
            signs = self._store.add(sign, 0) if self._store.check([sign]) else 0  # asking would make it
            if self._seen.get(rank, (-1, now))[0] != signs:
                self._seen[rank] = signs, now
        silent = [rank for rank in ranks if now - self._seen[rank][1] >= MISSED * self.every]
        return ranks_gone(self._group, silent)

    def _sign(self, rank: int) -> str:
        return f"{self._key}/{rank}/signs"
