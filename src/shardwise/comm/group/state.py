"""`GroupState`: all that the library keeps for one process group. `group_state` finds it.

Torch keeps the store of a group as long as the group is registered, and drops the store in `destroy_process_group`.
That ends the state: threads stop, pending messages are dropped, caches are emptied. Caches may hold the group, since
torch holds a registered group anyway; an ended state caches nothing.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from torch.distributed import ProcessGroup, distributed_c10d

from shardwise.comm.group.call_history import CallHistory
from shardwise.comm.group.message_threads import MessageThreads
from shardwise.errors import ProcessGroupError

NO_RANK = (
    "this process was forked from a rank (process {}), as the workers of a DataLoader are: it is no rank, and has no "
    "part in what the ranks do with a sharded tensor. Give it plain tensors instead, made before it is started: "
    "full_tensor(), or local_tensor() for the part of one rank; or let the DataLoader have num_workers=0"
)

P = ParamSpec("P")
R = TypeVar("R")
G = TypeVar("G", bound=ProcessGroup | None)


class GroupState:
    """What this rank keeps for a group; for None, what tensors without a group share."""

    def __init__(self, process_group: ProcessGroup | None) -> None:
        self.is_ended = False
        self._registry = distributed_c10d._world.pg_map  # ranks that are threads have one each
        store = None if process_group is None else self._registry.get(process_group, ("", None))[1]
        self._group, self._store = _reference(process_group), _reference(store)
        self._history: CallHistory | None = None
        self.message_threads = MessageThreads()
        self.programs: dict[Any, Any] = {}  # of recorded calls, by cache key; a str says why there is no program
        self.programs_of: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()  # by owner
        self.caches: dict[Callable[..., Any], Callable[..., Any]] = {}  # of the functions that are `cached_per_group`
        self.at_end: set[Callable[[GroupState], object]] = set()  # called when the state ends
        if process_group is not None:
            weakref.finalize(process_group, _states.pop, id(process_group), None).atexit = False
        for registered in (process_group, store):
            if registered is not None:
                weakref.finalize(registered, self.end).atexit = False

    @property
    def group(self) -> ProcessGroup | None:
        """The process group, while it lives."""
        found: ProcessGroup | None = self._group()
        return found

    @property
    def store(self) -> Any:
        """The store of the group; None where there is none, and after the group was destroyed."""
        return self._store()

    @property
    def is_registered(self) -> bool:
        """Whether torch knows the group: it is not destroyed."""
        return self._group() in self._registry

    @property
    def history(self) -> CallHistory:
        """The calls of this rank in the group."""
        if self._history is None:
            with _making:
                if self._history is None:
                    self._history = CallHistory(f"{self._name}, {self._life()}")
        return self._history

    @property
    def _name(self) -> str:
        group = self.group
        return "" if group is None else group.group_name

    def _life(self) -> int:
        """How many groups of this name the rank has had in this store.

        The store counts for each rank: a process that joins later has not had the groups that others had.
        """
        group, store = self.group, self.store
        with suppress(RuntimeError):  # the store is gone: nothing will be written into it
            if group is not None and store is not None:
                return int(store.add(f"shardwise/{self._name}: lives of {group.rank()}", 1))
        return 0

    def restart_history(self, number: int) -> None:
        """Forget the calls in a group that outlives them, as that of a pool of ranks. All ranks give the same number.

        They begin with an epoch that none of them has had, so all must have called `count_epochs` before.
        """
        store, name = self.store, f"{self._name}, anew {number}"
        first = store.add(self._epochs, 0) + number
        self._history = CallHistory(name, int(store.compare_set(f"shardwise/{name}", "", str(first))))

    def count_epochs(self) -> None:
        """Write into the store how many epochs this rank has had in the group since its history began."""
        history = self.history
        if history.epoch != history.first_epoch:
            self.store.add(self._epochs, history.epoch - history.first_epoch)

    @property
    def _epochs(self) -> str:
        return f"shardwise/{self._name}: epochs"

    def end(self) -> None:
        """The group is destroyed: stop the threads, drop pending messages and empty the caches."""
        if not self.is_ended:
            self.is_ended = True
            for callback in tuple(self.at_end):
                callback(self)
            self.message_threads.end()
            self.programs.clear()
            self.programs_of.clear()
            self.caches.clear()

    def add_cache(self, function: Callable[..., Any], cached: Callable[..., Any]) -> None:
        """Keep the cache of a function, unless another thread has just ended the state."""
        self.caches[function] = cached
        if self.is_ended:
            self.caches.clear()

    def forget_threads(self) -> None:
        """In a forked child, which has none of them."""
        _never_freed.extend((self.message_threads.pending, self.caches))
        self.message_threads.forget()
        self.caches = {}


def _reference(to: Any) -> Callable[[], Any]:
    return (lambda: None) if to is None else weakref.ref(to)


_states: dict[int, GroupState] = {}  # by the id of the group, for as long as the group lives
_inherited: dict[int, ProcessGroup] = {}  # groups of the process that this one was forked from
_never_freed: list[Any] = []  # in a forked child: to free a group is to wait for its threads, which are not there
_was_collecting: list[bool] = []
_making = threading.RLock()


def group_state(process_group: ProcessGroup | None) -> GroupState:
    """The state of a group, made when it is first asked for. None and a group of other ranks share one."""
    state = _states.get(id(process_group))
    if state is None:
        if not isinstance(process_group, ProcessGroup):
            return _NO_GROUP
        if id(process_group) in _inherited:
            raise ProcessGroupError(NO_RANK.format(os.getppid()))
        with _making:
            for known in tuple(_states.values()):  # whose stores somebody else holds
                if known.group is not None and not known.is_registered:
                    known.end()
            state = _states.get(id(process_group)) or _states.setdefault(id(process_group), GroupState(process_group))
    return state


_NO_GROUP = GroupState(None)


def _stop_collecting() -> None:
    """Before a fork: what is garbage by then, such as a group that was destroyed, is the parent's to free."""
    _was_collecting.append(gc.isenabled())
    gc.disable()


def _collect_again() -> None:
    if _was_collecting.pop():
        gc.enable()


def _become_no_rank() -> None:
    """In a forked child: it has the connections of its parent, and would read and send the parent's messages."""
    global _making
    gc.freeze()
    _collect_again()
    _making = threading.RLock()
    for state in (_NO_GROUP, *_states.values()):
        state.forget_threads()
    for group in (*distributed_c10d._world.pg_map, *[state.group for state in _states.values()]):
        if group is not None and group.size() > 1:  # alone, it talks to nobody
            _inherited[id(group)] = group
            _states.pop(id(group), None)


os.register_at_fork(before=_stop_collecting, after_in_parent=_collect_again, after_in_child=_become_no_rank)


def is_forked_from_rank() -> bool:
    """Whether this process was forked from one that was a rank then; it may be one in groups of its own."""
    return bool(_inherited)


def cached_per_group(
    maxsize: int = 64,
) -> Callable[[Callable[Concatenate[G, P], R]], Callable[Concatenate[G, P], R]]:
    """A decorator as `lru_cache`, for functions of a group and more: the cache lives in the group's state."""

    def decorate(function: Callable[Concatenate[G, P], R]) -> Callable[Concatenate[G, P], R]:
        @wraps(function)
        def cached(process_group: Any, *args: Any, **kwargs: Any) -> Any:
            state = group_state(process_group)
            found = state.caches.get(function)
            if found is None:
                if state.is_ended:
                    return function(process_group, *args, **kwargs)
                found = lru_cache(maxsize)(function)
                state.add_cache(function, found)
            return found(process_group, *args, **kwargs)

        return cast(Callable[Concatenate[G, P], R], cached)

    return decorate
