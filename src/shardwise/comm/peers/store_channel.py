"""`StoreChannel`: how ranks talk through a store. Each writes what it knows; the first decision holds for all."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

SHORTEST, LONGEST = 0.0005, 0.2  # seconds between two looks into the store, at first and at last


class StoreChannel:
    """Values of one undertaking in a store, by key. Values are what JSON knows.

    The store is one of torch, or has its methods. Without a store nobody reads, and nothing is there. A store that is
    gone raises a RuntimeError; a value that somebody else has written there, and is not JSON, raises a ValueError.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def write(self, key: object, value: Any) -> None:
        """Write a value for the other ranks."""
        if self._store is not None:
            self._store.set(self._name(key), json.dumps(value))

    def read(self, key: object) -> Any:
        """The value; None if there is none."""
        name = self._name(key)
        return json.loads(self._store.get(name)) if self._store is not None and self._store.check([name]) else None

    def read_all(self, keys: Sequence[object]) -> list[Any]:
        """Values that are there, in one question."""
        if self._store is None:
            return []
        return [json.loads(value) for value in self._store.multi_get([self._name(key) for key in keys])]

    def decide(self, proposed: Any, key: object = "verdict") -> Any:
        """The decision of all ranks: the proposed one, unless there is another."""
        if self._store is None:
            return proposed
        return json.loads(self._store.compare_set(self._name(key), "", json.dumps(proposed)))

    def decision(self) -> Any:
        """What was decided; None if nothing was."""
        return self.read("verdict")

    def add(self, key: object, amount: int) -> int:
        """Add to a number, which is 0 at first; gives the sum."""
        return 0 if self._store is None else int(self._store.add(self._name(key), amount))

    def count(self, key: object) -> int:
        """The number; 0 if nobody has added to it. Asking does not write."""
        return self.add(key, 0) if not self.missing([key]) else 0

    def delete(self, keys: Sequence[object]) -> None:
        """Remove values."""
        for key in keys if self._store is not None else ():
            self._store.delete_key(self._name(key))

    def missing(self, keys: Sequence[object]) -> list[Any]:
        """The keys that have no value yet."""
        if self._store is None:
            return list(keys)
        if self._store.check([self._name(key) for key in keys]):  # in one question
            return []
        return [key for key in keys if not self._store.check([self._name(key)])]

    def wait(
        self,
        keys: Sequence[Any],
        seconds: float | None,
        check: Callable[[list[Any]], object] = lambda missing: None,
        every: float = 1.0,
        longest: float = LONGEST,
    ) -> list[Any]:
        """Wait until these keys have values; gives those that have none after so many seconds.

        Every few seconds it is checked, given the keys that are missing, whether to go on waiting. The pause between
        two looks into the store grows up to the longest one. (Torch's own wait logs a stack when its time is over, and
        cannot be ended where a link is cut.)
        """
        begun = checked = time.monotonic()
        pause = SHORTEST
        while missing := self.missing(keys):
            now = time.monotonic()
            if seconds is not None and now - begun > seconds:
                return missing
            if now - checked >= every:
                checked = now
                check(missing)
            time.sleep(pause)
            pause = min(pause * 1.5, LONGEST)
        return []

    def _name(self, key: object) -> str:
        return f"{self._prefix}/{key}"
