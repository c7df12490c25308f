"""A client of a TCPStore whose every call has a limit: torch's own calls wait for ever where a link is cut.

Jobs talk through it by a `StoreChannel`, as the ranks of one job do through the store of their process group.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

from torch.distributed import TCPStore  # type: ignore[attr-defined] # documented, yet not declared

from shardwise.errors import TransferError

T = TypeVar("T")
PAUSE = 0.05  # seconds between two attempts to connect, and at most between two looks for a value
LOOPBACK = "127.0.0.1"
ATTEMPT = 1.0  # seconds for the first attempt to connect
SLACK = 5.0  # seconds that an answer may take, on a machine that is busy, however short the timeout is
LONGEST_ANSWER = 30.0  # seconds after which a store that has not answered is gone, however long the timeout is


@dataclass(frozen=True)
class Address:
    """Where a store listens."""

    host: str
    port: int

    @staticmethod
    def parse(text: str) -> Address:
        """Of "host:port"."""
        host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
        if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
            raise ValueError(f'the address of a store is "host:port"; found {text!r:.80}')
        return Address(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def reached_from(self) -> str:
        """The address of this host by which it reaches the store: where other ranks can reach this one."""
        family, kind, protocol, _, place = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # of a datagram socket: nothing is sent
            return str(probe.getsockname()[0])

    def connect(self, limit: float, closed: threading.Event) -> TCPStore:
        """A client of the store there, as soon as somebody listens, unless it is not wanted any more.

        Torch's own attempts cannot be ended, and log a stack each: a process that ends meanwhile would abort.
        """
        begun = time.monotonic()
        while True:
            left = limit - (time.monotonic() - begun)
            try:
                socket.create_connection((self.host, self.port), timeout=max(min(left, ATTEMPT), PAUSE)).close()
                break
            except OSError:
                if left <= 0 or closed.wait(PAUSE):
                    raise
        return _store(self.host, self.port, max(limit - (time.monotonic() - begun), SLACK))

    def serve(self, limit: float) -> TCPStore:
        """A store that listens at this port, until it is dropped; one for all who ask for it in this process.

        It listens on all addresses of this host, and is asked here by a way that needs no network: whether others can
        reach it, and this process by the address that was given, they find out when they call.
        """
        try:
            return _store(LOOPBACK, self.port, limit, is_master=True, multi_tenant=True)
        except RuntimeError as error:
            raise TransferError(
                f"this process is to host the store at {self} and cannot ({_line(error)}): give an address of this "
                "host with a free port, or host=False where another process hosts it"
            ) from error


def _store(host: str, port: int, limit: float, **options: bool) -> TCPStore:
    """A store of torch. Its attempts to connect hang now and then, also on one host: so it is tried again, for twice as
    long each time."""
    begun, attempt = time.monotonic(), ATTEMPT
    while True:
        left = max(limit - (time.monotonic() - begun), SLACK)
        try:
            seconds = timedelta(seconds=min(left, attempt))
            store = TCPStore(host, port, timeout=seconds, wait_for_workers=False, **options)
        except RuntimeError as error:
            if left <= attempt or "timed out" not in str(error):
                raise
            attempt *= 2
            continue
        store.set_timeout(timedelta(seconds=limit))
        return store


class StoreClient:
    """A connection to a store. After a call that has failed or got no answer in time, it is of no use any more."""

    def __init__(self, address: Address, limit: float) -> None:
        """Begin to connect, which goes on until a store listens there, or for so many seconds."""
        self.address = address
        self._asked: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self.sound = True
        self._hello, self._limit = _Call(lambda store: store.check(["any"])), limit
        self._asked.put(self._hello)
        self._closed = threading.Event()
        threading.Thread(
            target=_answer, args=(self._asked, address, limit, self._closed), name="shardwise store", daemon=True
        ).start()
        self._hang_up = weakref.finalize(self, _hang_up, self._asked, self._closed)  # also if nobody closes it

    @property
    def is_connecting(self) -> bool:
        """Whether it is not known yet if there is a store."""
        return not self._hello.done.is_set()

    def connected(self) -> StoreClient:
        """This client, once it is."""
        self._answer(self._hello, self._limit + SLACK)
        return self

    def close(self) -> None:
        """Hang up."""
        self.sound = False
        self._hang_up()

    # The methods of a store that a `StoreChannel` calls.

    def set(self, key: str, value: str) -> None:
        """Write a value."""

        def written(store: TCPStore) -> None:
            store.set(key, value)
            store.check([key])  # which is answered

        self._ask(written)

    def get(self, key: str) -> bytes:
        """A value that is there."""
        return bytes(self._ask(lambda store: store.get(key)))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Values that are there."""
        found: list[bytes] = self._ask(lambda store: store.multi_get(keys))
        return found

    def check(self, keys: list[str]) -> bool:
        """Whether all these values are there."""
        return bool(self._ask(lambda store: store.check(keys)))

    def add(self, key: str, amount: int) -> int:
        """Add to a number; gives the sum."""
        return int(self._ask(lambda store: store.add(key, amount)))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Write a value if the expected one is there; gives the one that is there then."""
        return bytes(self._ask(lambda store: store.compare_set(key, expected, value)))

    def delete_key(self, key: str) -> bool:
        """Remove a value."""
        return bool(self._ask(lambda store: store.delete_key(key)))

    def connect_over(self, make: Callable[[TCPStore], T], limit: float) -> T:
        """A backend that is made over the store; TransferError where its ranks do not reach each other in time."""
        failed: list[Exception] = []

        def made(store: TCPStore) -> T | None:
            try:
                return make(store)
            except RuntimeError as error:
                failed.append(error)
                return None

        found = self._ask(made, limit, "the ranks of the two jobs could not connect with each other")
        if failed:
            raise TransferError(f"the ranks of the two jobs could not connect with each other: {_line(failed[0])}")
        return cast(T, found)

    def _ask(self, what: Callable[[TCPStore], Any], limit: float | None = None, else_: str = "") -> Any:
        if not self.sound:
            raise self._gone("the connection is broken")
        call = _Call(what)
        self._asked.put(call)
        return self._answer(call, min(self._limit, LONGEST_ANSWER) if limit is None else limit, else_)

    def _answer(self, call: _Call, limit: float, else_: str = "") -> Any:
        if not call.done.wait(max(limit, SLACK)):
            self.close()
            raise self._gone(f"there is no answer within {limit:.1f} s", else_)
        if call.error is not None:
            self.close()
            raise self._gone(_line(call.error)) from call.error
        return call.value

    def _gone(self, why: str, what: str = "") -> TransferError:
        return TransferError(
            f"{what or f'the store at {self.address} cannot be reached'} ({why}): a process has died or not begun, "
            "or a link is cut"
        )


class _Call:
    """What a store is asked, and the answer."""

    def __init__(self, what: Callable[[TCPStore], Any]) -> None:
        self.what, self.done = what, threading.Event()
        self.value: Any = None
        self.error: Exception | None = None


def _hang_up(asked: queue.SimpleQueue[_Call | None], closed: threading.Event) -> None:
    closed.set()
    asked.put(None)


def _answer(asked: queue.SimpleQueue[_Call | None], address: Address, limit: float, closed: threading.Event) -> None:
    """The thread of a client: it alone holds the connection, and is left to it where no answer comes."""
    store = None
    while (call := asked.get()) is not None:
        try:
            if store is None:
                store = address.connect(limit, closed)
            call.value = call.what(store)
        except Exception as error:  # whoever asks raises it
            call.error = error
        call.done.set()
        del call
    with suppress(RuntimeError):
        del store


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
