"""Wires between jobs: a backend of gloo or NCCL of their own, which torch.distributed's world knows nothing of."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import Store

from shardwise.comm.transfer.wire import Buffer, PendingWork
from shardwise.errors import TransferError
from shardwise.state_transfer.threads import within
from shardwise.state_transfer.wires import StateWire

TAG = 0  # of all messages: between two ranks they come in order
PROBE, NOBODYS = 1, 2  # of messages that nobody sends
LOOKS = 0.0005  # seconds between two looks whether NCCL is through
PARTING = 5.0  # seconds that NCCL may take to end what it does
# A rank that is gone must not end this process, as torch's watchdog by default does, for this group or, warned by it,
# for others of the process: there is none where waiting blocks. The wire looks itself, and waits for what is over only.
UNWATCHED = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # these if there is a watchdog all the same
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",  # that it sleeps after an error, while whoever drops it waits for it
}


def gloo_over(store: Store, number: int, size: int, timeout: float, host: str) -> Any:
    """Gloo between so many ranks that meet in a store, of which this is one. It is reached at this host."""
    gloo: Any = c10d.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout)
    options._threads = 1  # for collectives, which there are none of
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    options._devices = [
        gloo.create_device(interface=named.split(",")[0]) if named else gloo.create_device(hostname=host)
    ]
    return gloo(store, number, size, options)


def nccl_over(store: Store, number: int, size: int, timeout: float, device: torch.device) -> Any:
    """The same of NCCL, for a CUDA device. NCCL finds the way to hosts by itself.

    It connects all ranks now: later it would in the first batch, to which some have nothing to add.
    """
    nccl: Any = c10d.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timedelta(seconds=10 * timeout + 600)  # never: the wire has its own limit
    with _environment(UNWATCHED):
        backend = nccl(store, number, size, options)
    backend.eager_connect_single_device(device)
    return backend


_one_at_a_time = threading.Lock()


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Have these variables set, for what reads them only when it is made; for one thread at a time."""
    with _one_at_a_time:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


Numbered = Iterator[tuple[int, str, torch.Tensor]]  # number in the backend, what errors call the rank, memory


class JobWire(StateWire):
    """The ranks of two jobs, which agree in their store: on a run when they meet, and when all of it has come. After an
    error the wire is of no use: `close` it, and make another in another meeting."""

    def __init__(
        self, backend: Any, numbers: Mapping[int, int], names: Mapping[int, str], timeout: float, device: torch.device
    ) -> None:
        """With the number of each rank in the backend, and what errors call it."""
        self._backend, self._numbers, self._names = backend, numbers, names
        self._timeout, self.device = timeout, device
        self._under_way: list[_Sent | _Streamed] = []
        self._probes: list[Any] = []

    def exchange(self, receives: Sequence[Buffer], sends: Iterable[Buffer]) -> PendingWork:
        """Begin to receive and to send; what does not end within the timeout is an error."""
        taken, given = self._numbered(receives), self._numbered(sends)
        waiting: _Sent | _Streamed
        if self.device.type == "cpu":
            waiting = _Sent(self._backend, taken, given, self._timeout)
        else:
            waiting = _Streamed(self._backend, taken, given, self._timeout, self._limited)
        self._under_way = [*(each for each in self._under_way if not each.over), waiting]
        return waiting

    def _numbered(self, messages: Iterable[Buffer]) -> Numbered:
        return ((self._numbers[rank], self._names[rank], memory) for rank, memory in messages)

    def _limited(self, begin: Callable[[], None]) -> None:
        """Begin, within the timeout. NCCL must not be ended by one thread while another one connects ranks: where that
        takes too long, or is interrupted, all is left to it, to be ended by it."""
        done = False

        def work() -> None:
            nonlocal done
            begin()
            done = True

        try:
            within(self._timeout, work, late=partial(_end, self._backend, self.device, self._under_way))
        except (TimeoutError, KeyboardInterrupt):
            if not done:
                self._backend, self._under_way = None, []
            raise

    def gone(self) -> list[int]:
        """The ranks to which the connection is known to be broken. Only gloo tells; nothing is sent."""
        found = []
        for rank, number in self._numbers.items() if self.device.type == "cpu" else ():
            if number != self._backend.rank():
                try:
                    memory = torch.empty(1, dtype=torch.uint8)
                    self._probes.append(self._backend.recv([memory], number, PROBE))
                except RuntimeError:  # at once, where it is broken
                    found.append(rank)
        return found

    def close(self) -> None:
        """Break all connections, which others that wait for this rank notice at once."""
        backend, self._backend = self._backend, None
        under_way, self._under_way = self._under_way, []
        self._probes.clear()
        if backend is not None and self.device.type == "cpu":
            hang_up(backend)
        elif backend is not None:
            try:
                within(PARTING, partial(_end, backend, self.device, under_way), late=lambda: None)
            except TimeoutError:
                return  # the thread keeps what NCCL may use yet
        del backend
        for each in under_way:
            each.forget()  # messages hold the connections, too, and tracebacks hold messages


def hang_up(gloo: Any) -> None:
    """Break all connections now, whoever still has a message of them: gloo does so when the limit of a wait passes."""
    for number in range(gloo.size()):
        if number != gloo.rank():
            with suppress(RuntimeError, ValueError):
                gloo.recv([torch.empty(1, dtype=torch.uint8)], number, NOBODYS).wait(timedelta(milliseconds=1))


def _each(backend: Any, receives: Numbered, sends: Numbered) -> Iterator[tuple[str, Callable[[], Any]]]:
    for number, name, memory in receives:
        yield f"receive from {name}", partial(backend.recv, [memory], number, TAG)
    for number, name, memory in sends:
        yield f"send to {name}", partial(backend.send, [memory], number, TAG)


class _Sent:
    """Messages of gloo."""

    def __init__(self, backend: Any, receives: Numbered, sends: Numbered, timeout: float) -> None:
        self._timeout, self.over = timeout, False
        self._works: list[tuple[str, Any]] = []
        for what, post in _each(backend, receives, sends):
            with _losing(what):
                self._works.append((what, post()))
        self._works.reverse()  # the first one is waited for first

    def wait(self) -> None:
        """Until all has come and gone."""
        end = time.monotonic() + self._timeout
        while self._works:
            with _losing(self._works[-1][0]):
                self._works[-1][1].wait(timedelta(seconds=max(end - time.monotonic(), 0.001)))
            self._works.pop()
        self.over = True

    def forget(self) -> None:
        """Have no part in the connections any more."""
        self._works.clear()


def _end(nccl: Any, device: torch.device, held: Sequence[_Sent | _Streamed]) -> None:
    """End what NCCL does on the device, with memory of messages that whoever calls this holds so long."""
    with suppress(RuntimeError):
        nccl.abort()
    with suppress(RuntimeError):
        torch.cuda.synchronize(device)
    del held


class _Streamed:
    """Messages of NCCL, in one batch. The host waits for them: a stream would wait for a dead rank for ever.

    Also to begin may take for ever: NCCL connects two ranks when they first send to each other.
    """

    def __init__(
        self,
        backend: Any,
        receives: Numbered,
        sends: Numbered,
        timeout: float,
        limited: Callable[[Callable[[], None]], None],
    ) -> None:
        self._backend, self._timeout, self.over = backend, timeout, False
        self._messages = [*receives], [*sends]  # whose memory NCCL uses until they are over
        self._what = "exchange with " + ", ".join(dict.fromkeys(name for side in self._messages for _, name, _ in side))
        self._work: Any = None
        if any(self._messages):
            with _losing(self._what):
                limited(self._begin)

    def _begin(self) -> None:
        self._backend._start_coalescing()
        for _, post in _each(self._backend, *map(iter, self._messages)):
            post()
        self._work = self._backend._end_coalescing()

    def wait(self) -> None:
        """Until all has come and gone."""
        if self._work is not None:
            end = time.monotonic() + self._timeout
            with _losing(self._what):
                while not self._work.is_completed():
                    if time.monotonic() > end:
                        raise TimeoutError("timed out")
                    time.sleep(LOOKS)
                within(PARTING, self._work.wait, late=lambda: None)  # it ends NCCL, if something has failed
        self.over = True
        self.forget()

    def forget(self) -> None:
        """Have no part in the connections any more."""
        self._backend = self._work = None
        self._messages = [], []


@contextmanager
def _losing(what: str) -> Iterator[None]:
    """Say which rank it is that could not be reached."""
    try:
        yield
    except (RuntimeError, ValueError, TimeoutError) as error:
        slow = isinstance(error, TimeoutError) or "timed out" in str(error).lower()
        why = "nothing came or went within the timeout" if slow else "it has died or left"
        says = str(error).strip().partition("\n")[0]
        raise TransferError(f"could not {what}: {why} (torch says: {says})") from error
