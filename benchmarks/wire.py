"""What a rank sends: collectives, bytes and control messages, counted where calls reach a process group.

Calls of Python are counted at the methods of `ProcessGroup`. Functional collectives, as DTensor makes them, go there
below Python: they are counted where they pass torch's dispatcher. Bytes are those that leave this rank if the group
works as a ring, or sends straight to whom they are for.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

CONTROL = ("shardwise/comm/agreement/", "shardwise/comm/peers/")  # from where headers are sent, and no data
CARRIERS = ("shardwise/comm/group/tagged_messages.py",)  # which sends for whoever asks


@dataclass(frozen=True)
class Sent:
    """One collective: its kind, the bytes that leave this rank, and whether they are a header rather than data."""

    kind: str
    bytes: float
    control: bool


class Wire:
    """All that this rank has sent while it was watched."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.host_waits = 0  # times that the host waited for a GPU
        self._open: set[tuple[str, int]] = set()  # who takes part in the exchange whose messages are being posted
        self._tag = 0

    @property
    def collectives(self) -> int:
        """Collectives that carry data."""
        return sum(not one.control for one in self.sent)

    @property
    def control_messages(self) -> int:
        """Collectives that carry headers."""
        return sum(one.control for one in self.sent)

    @property
    def bytes(self) -> float:
        """Bytes that left this rank, headers counted in."""
        return sum(one.bytes for one in self.sent)

    def note(self, kind: str, size: float) -> None:
        """A collective."""
        self._open.clear()
        self.sent.append(Sent(kind, size, _is_control()))

    def note_message(self, direction: str, peer: int, tag: int, size: float) -> None:
        """A message to or from one rank: of the exchange that is being posted, or the first one of the next."""
        control = _is_control()
        joins = self._open and (direction, peer) not in self._open and tag == self._tag
        if joins and self.sent[-1].control == control:
            self.sent[-1] = Sent("exchange", self.sent[-1].bytes + size, control)
        else:
            self._open.clear()
            self.sent.append(Sent("exchange", size, control))
        self._open.add((direction, peer))
        self._tag = tag


def _is_control() -> bool:
    """Whether whoever sends is in a file that sends headers: the nearest frame of shardwise that is no carrier's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/shardwise/" in file and not file.endswith(CARRIERS):
            return any(part in file for part in CONTROL)
        frame = frame.f_back
    return False


# Bytes that leave a rank ----------------------------------------------------------------------------------------------


def _nbytes(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0


def _ring(times: float) -> Callable[[float, int], float]:
    return lambda size, ranks: times * size * (ranks - 1) / ranks


REDUCED, SPREAD = _ring(2), _ring(1)  # of all bytes, so many times all but a rank's own part


def _exchanged(given: torch.Tensor, splits: Sequence[int], group: Any) -> float:
    ranks, here = group.size(), group.rank()
    own = splits[here] / max(sum(splits), 1) if splits else 1 / ranks
    return float(given.nbytes * (1 - own))


Count = Callable[[Any, Sequence[Any]], float]  # of a group and the arguments of its method

METHODS: dict[str, tuple[str, Count]] = {
    "allreduce": ("all-reduce", lambda group, args: REDUCED(_nbytes(args[0]), group.size())),
    "broadcast": ("broadcast", lambda group, args: SPREAD(_nbytes(args[0]), group.size())),
    "allgather": ("all-gather", lambda group, args: SPREAD(_nbytes(args[0]), group.size())),
    "_allgather_base": ("all-gather", lambda group, args: SPREAD(_nbytes(args[0]), group.size())),
    "all_gather_single": ("all-gather", lambda group, args: SPREAD(_nbytes(args[0]), group.size())),
    "allgather_into_tensor_coalesced": ("all-gather", lambda group, args: SPREAD(_nbytes(args[0]), group.size())),
    "all_gather_single_coalesced": ("all-gather", lambda group, args: SPREAD(_nbytes(args[0]), group.size())),
    "reduce_scatter": ("reduce-scatter", lambda group, args: SPREAD(_nbytes(args[1]), group.size())),
    "_reduce_scatter_base": ("reduce-scatter", lambda group, args: SPREAD(_nbytes(args[1]), group.size())),
    "reduce_scatter_single": ("reduce-scatter", lambda group, args: SPREAD(_nbytes(args[1]), group.size())),
    "reduce_scatter_tensor_coalesced": ("reduce-scatter", lambda group, args: SPREAD(_nbytes(args[1]), group.size())),
    "alltoall_base": ("all-to-all", lambda group, args: _exchanged(args[1], args[3], group)),
    "all_to_all_single": ("all-to-all", lambda group, args: _exchanged(args[1], args[3], group)),
    "alltoall": ("all-to-all", lambda group, args: SPREAD(_nbytes(args[1]), group.size())),
}

FUNCTIONAL: dict[str, tuple[str, Callable[[Sequence[Any], Any], float]]] = {
    "_c10d_functional::all_reduce": ("all-reduce", lambda args, out: REDUCED(_nbytes(out), _ranks(args[2]))),
    "_c10d_functional::all_reduce_": ("all-reduce", lambda args, out: REDUCED(_nbytes(out), _ranks(args[2]))),
    "_c10d_functional::all_gather_into_tensor": ("all-gather", lambda args, out: SPREAD(_nbytes(out), _ranks(args[2]))),
    "_c10d_functional::reduce_scatter_tensor": (
        "reduce-scatter",
        lambda args, out: SPREAD(_nbytes(args[0]), _ranks(args[3])),
    ),
    "_c10d_functional::all_to_all_single": (
        "all-to-all",
        lambda args, out: _exchanged(args[0], args[2], _resolve_process_group(args[3])),
    ),
    "_dtensor::shard_dim_alltoall": (
        "all-to-all",
        lambda args, out: _exchanged(args[0], (), _resolve_process_group(args[3])),
    ),
    "_c10d_functional::broadcast": ("broadcast", lambda args, out: SPREAD(_nbytes(out), _ranks(args[2]))),
}
SILENT = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")


def _ranks(group: Any) -> int:
    return _resolve_process_group(group).size()


# Watching -------------------------------------------------------------------------------------------------------------


class _Functional(TorchDispatchMode):
    """Notes functional collectives; one that it does not know is an error."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().split(".")[0]
        if name in FUNCTIONAL:
            kind, count = FUNCTIONAL[name]
            self._wire.note(kind, count(args, result))
        elif func.namespace in ("_c10d_functional", "_dtensor") and name not in SILENT:
            raise ValueError(f"nobody says how many bytes a rank sends in {name}")
        return result


def _noting(wire: Wire, method: Any, kind: str, count: Count) -> Any:
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        wire.note(kind, count(group, args))
        return method(group, *args, **kwargs)

    return call


def _noting_messages(wire: Wire, method: Any, direction: str) -> Any:
    def call(group: Any, tensors: Any, peer: int, tag: int = 0) -> Any:
        wire.note_message(direction, peer, tag, _nbytes(tensors) if direction == "to" else 0)
        return method(group, tensors, peer, tag)

    return call


@contextmanager
def watched(*, functional: bool) -> Iterator[Wire]:
    """Count what this rank sends. A dispatch mode, for functional collectives, changes how shardwise finds its way."""
    wire = Wire()
    owners = [dist.ProcessGroup, torch._C._distributed_c10d.Backend]
    with ExitStack() as stack:
        for owner in owners:
            for name, (kind, count) in METHODS.items():
                if name in vars(owner):
                    stack.enter_context(
                        mock.patch.object(owner, name, _noting(wire, getattr(owner, name), kind, count))
                    )
            for name, direction in (("send", "to"), ("recv", "from")):
                if name in vars(owner):
                    noting = _noting_messages(wire, getattr(owner, name), direction)
                    stack.enter_context(mock.patch.object(owner, name, noting))
        if functional:
            stack.enter_context(_Functional(wire))
        stack.enter_context(_host_waits(wire))
        yield wire


@contextmanager
def _host_waits(wire: Wire) -> Iterator[None]:
    """Count, by torch's warnings, how often the host waits for a GPU."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        yield
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    wire.host_waits = sum("called a synchronizing" in str(one.message) for one in caught)
