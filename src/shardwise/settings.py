"""Settings of a context: the group to unpickle onto, checks between ranks, the gather budget, the rules for plain
batches and for random numbers; and `ContextValue`, by which such values reach the threads of a backward."""

from __future__ import annotations

import contextvars
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from shardwise.torch_private import current_backward, get_thread_local, is_thread_local, run_backward, set_thread_local

T = TypeVar("T")
MIB = 2**20


# Values of a context -------------------------------------------------------------------------------------------------

_cuda_is_initialized: Any = torch.cuda.is_initialized
CONTEXT = "context"  # torch's key for the caller's context variables
CONTEXT_IS_PROPAGATED = "copy_context" in run_backward.__code__.co_names


class ContextValue(Generic[T]):
    """A value of the current context; in a thread of a backward, the value that the caller of the backward has.

    A backward over CUDA tensors runs in one thread for each device, and these threads do not have the contexts of the
    thread that called it. Torch propagates some thread-local objects to them: from 2.13 on the caller's context
    variables, before that only objects that are stored under a key.
    """

    def __init__(self, name: str, default: T) -> None:
        self._name, self._default = name, default
        self._variable = contextvars.ContextVar(name, default=default)
        self.was_set = False

    def get(self) -> T:
        """The value in this context."""
        value = self._variable.get()
        if value is self._default and self.was_set and current_backward() != -1:
            return self._value_of_caller()
        return value

    def _value_of_caller(self) -> T:
        if CONTEXT_IS_PROPAGATED:
            context: Any = get_thread_local(CONTEXT) if is_thread_local(CONTEXT) else {}
            value: T = context.get(self._variable, self._default)
        else:
            value = get_thread_local(self._name) if is_thread_local(self._name) else self._default
        return value

    @contextmanager
    def set(self, value: T) -> Iterator[None]:
        """Set the value within a context."""
        self.was_set = True
        before, token = self._variable.get(), self._variable.set(value)
        propagates = not CONTEXT_IS_PROPAGATED and _cuda_is_initialized()  # without CUDA there are no such threads
        if propagates:
            _propagate(self._name, value)
        try:
            yield
        finally:
            if propagates:
                _propagate(self._name, before)
            with suppress(ValueError):  # a generator that is closed in another context has nothing to reset here
                self._variable.reset(token)


def _propagate(name: str, value: object) -> None:
    """Store an object that torch propagates to the threads of a backward."""
    if not _torch_takes_reference():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    set_thread_local(name, value)


@functools.cache
def _torch_takes_reference() -> bool:
    """Whether torch adds a reference to a stored object. Some versions only drop one in the end."""
    probe = object()
    for _ in range(4):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    before = sys.getrefcount(probe)
    set_thread_local("shardwise.probe", probe)
    return sys.getrefcount(probe) > before


# Settings ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The settings of one context."""

    process_group: Any = None
    validate: bool = True
    strict: bool = False  # whether ranks also compare before every op
    compares_first: bool = True  # whether values of plain operands are compared in the first calls of a kind
    gather_budget: int = MIB
    whole_sums: int = 0  # bytes of a sum over what is cut, up to which every rank gets all of it
    own_batches: bool = False  # whether plain inputs of linear and embeddings are each rank's own
    own_draws: bool = False  # whether each rank draws for its shards as for plain tensors of their sizes
    shared_files: bool = False  # whether ranks may `torch.save` their shards to one file, as in the old system
    mutable_specs: bool = False  # whether new specs can be changed, as in the old system
    outsiders_compare: bool = False  # whether a rank outside of tensors' group finds them equal, as in the old system

    @functools.cached_property
    def of_calls(self) -> tuple[Any, ...]:
        """The settings that a call on sharded tensors depends on."""
        return self.gather_budget, self.whole_sums, self.own_batches, self.own_draws, self.validate


class _Within(NamedTuple):
    """The settings within a context, and what they were computed from."""

    changes: dict[str, Any]  # of this context and those around it
    outside: Settings
    settings: Settings


_within: ContextValue[_Within | None] = ContextValue("shardwise.settings", None)
_outside = Settings()  # outside of every context, in the whole process


def current() -> Settings:
    """The settings in this context."""
    within = _within.get() if _within.was_set else None  # every op comes here
    if within is None:
        return _outside
    return within.settings if within.outside is _outside else replace(_outside, **within.changes)


def set_outside(**changes: Any) -> None:
    """Change the settings outside of every context, in all threads: for the drop-in."""
    global _outside
    _outside = replace(_outside, **changes)


@contextmanager
def changed(**changes: Any) -> Iterator[None]:
    """Change settings within a context."""
    around = _within.get()
    changes = changes if around is None else {**around.changes, **changes}
    with _within.set(_Within(changes, _outside, replace(_outside, **changes))):
        yield


def carried(function: Callable[[], T]) -> Callable[[], T]:
    """The function, called with the settings of the current context wherever it is called."""
    within = _within.get()

    def there() -> T:
        with _within.set(within):
            return function()

    return there


@contextmanager
def gather_budget(max_bytes: int) -> Iterator[None]:
    """Within this context, how many bytes of whole operands one op may gather on every rank; by default 1 MiB.

    An op without a rule that leaves shards apart is computed on the whole operands when they are within the budget, and
    raises otherwise. 0 means never. What does not count is an operand that is broadcast along what is cut and is no
    larger than a rank's share of the result: every rank needs all of it. Nor does, unless the budget is 0, what another
    op has made if it is multiplied by a matrix and is no larger than the product: layers whose weights lie apart need
    all of what comes in, however large it is. Must be the same on every rank. What is beyond it raises
    `UnsupportedOpError` on every rank::

        >>> x = shardwise.rand(0, 600, 600)
        >>> with shardwise.gather_budget(4 * 2**20):
        ...     torch.linalg.svdvals(x).shape  # needs all of it
        torch.Size([600])
    """
    with changed(gather_budget=int(max_bytes)):
        yield


@contextmanager
def own_batches(enabled: bool = True) -> Iterator[None]:
    """Within this context, a plain input of an op with a sharded weight is this rank's own batch, as in the old system.

    It concerns `linear`, `embedding` and `embedding_bag`: `linear` gives a sharded tensor over the batches of all
    ranks, the embeddings this rank's plain rows. A `ReplicatedTensor` is the same batch on every rank. Outside, and in
    every other op, a plain tensor is the same on every rank, and `from_local` says what is each rank's own. While the
    drop-in is installed this is the rule everywhere, and ``own_batches(False)`` goes back to the other one. Must be the
    same on every rank, and hold where a checkpoint (`torch.utils.checkpoint`) computes again, in the backward.
    """
    with changed(own_batches=enabled):
        yield


@contextmanager
def own_draws(enabled: bool = True) -> Iterator[None]:
    """Within this context, each rank draws the random numbers of its own shards, as in the old system.

    A shard gets what a plain tensor of its size would get from this rank's generator, so ranks must be seeded
    differently, and the numbers depend on the layout. Outside, ranks are seeded alike, and a sharded tensor gets the
    numbers of a plain tensor of the whole size. While the drop-in is installed this is the rule everywhere, and
    ``own_draws(False)`` goes back to the other one. Must be the same on every rank.
    """
    with changed(own_draws=enabled):
        yield
