"""`Heartbeats`: signs of life that ranks give through the store while they do something slow in the background.

A rank that waits for others would else wait for one that is gone as long as for one that is slow. A broken connection
does not tell them apart: a time limit that has passed breaks one, too, while the other rank goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from torch.distributed import ProcessGroup

from shardwise.comm.peers.lost_ranks import ranks_gone
from shardwise.comm.peers.store_channel import StoreChannel

EVERY = 1.0  # seconds between two heartbeats
AT_ONCE = 1000  # ranks of which a store takes a heartbeat in a second
MISSED = 10  # so many in a row, of a rank to which the connection is broken: it is gone


class Heartbeats:
    """Those of one undertaking of a group's ranks; without a group there are none."""

    def __init__(self, process_group: ProcessGroup | None, here: int, channel: StoreChannel) -> None:
        self._group, self._here, self._channel = process_group, here, channel
        ranks = 1 if process_group is None else process_group.size()
        self.every = EVERY * max(1.0, ranks / AT_ONCE)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._seen: dict[int, tuple[int, float]] = {}  # how many heartbeats of a rank, and when the last was found

    def begin(self) -> None:
        """Give heartbeats, from a thread, until the end."""
        if self._group is not None:
            self._thread = threading.Thread(target=self._beat, name="shardwise heartbeats", daemon=True)
            with suppress(RuntimeError):  # there are too many threads
                self._thread.start()

    def _beat(self) -> None:
        given = False
        with suppress(RuntimeError):  # the store is gone, or cannot delete
            while not self._over.wait(self.every):
                given = self._channel.add(f"{self._here}/heartbeats", 1) > 0
            if given:
                self._channel.delete([f"{self._here}/heartbeats"])

    def end(self) -> None:
        """Give no more heartbeats."""
        self._over.set()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(self.every)

    def count(self, rank: int) -> int:
        """How many heartbeats a rank has given."""
        return self._channel.count(f"{rank}/heartbeats")

    def gone(self, ranks: Sequence[int]) -> list[int]:
        """Those of these ranks that have given no heartbeat for long, and to which the connection is broken."""
        if self._group is None:
            return []
        now = time.monotonic()
        for rank in ranks:
            count = self.count(rank)
            if self._seen.get(rank, (-1, now))[0] != count:
                self._seen[rank] = count, now
        silent = [rank for rank in ranks if now - self._seen[rank][1] >= MISSED * self.every]
        return ranks_gone(self._group, silent)
