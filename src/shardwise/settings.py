"""What a context sets for the calls within it: the group to unpickle onto, checks between ranks, the gather budget, the
rules for plain batches and for random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from shardwise.ambient import Ambient

T = TypeVar("T")
MIB = 2**20


@dataclass(frozen=True)
class Settings:
    """The settings of one context."""

    process_group: Any = None
    validate: bool = True
    strict: bool = False  # whether ranks also compare before every op
    gather_budget: int = MIB
    own_batches: bool = False  # whether plain inputs of linear and embeddings are each rank's own
    own_draws: bool = False  # whether each rank draws for its shards as for plain tensors of their sizes
    shared_files: bool = False  # whether ranks may `torch.save` their shards to one file, as in the old system
    mutable_specs: bool = False  # whether new specs can be changed, as in the old system
    outsiders_compare: bool = False  # whether a rank outside of tensors' group finds them equal, as in the old system


class _Within(NamedTuple):
    """What a context holds: what it and those around it change, and what comes of it."""

    changes: dict[str, Any]
    outside: Settings
    settings: Settings


_within: Ambient[_Within | None] = Ambient("shardwise.settings", None)
_outside = Settings()  # what holds outside of every context, in the whole process


def current() -> Settings:
    """The settings that hold here."""
    within = _within.get()
    if within is None:
        return _outside
    return within.settings if within.outside is _outside else replace(_outside, **within.changes)


def set_outside(**changes: Any) -> None:
    """Change what holds outside of every context, in all threads: for the drop-in."""
    global _outside
    _outside = replace(_outside, **changes)


@contextmanager
def changed(**changes: Any) -> Iterator[None]:
    """Within this context, other settings."""
    around = _within.get()
    changes = changes if around is None else {**around.changes, **changes}
    with _within.set(_Within(changes, _outside, replace(_outside, **changes))):
        yield


def carried(function: Callable[[], T]) -> Callable[[], T]:
    """The function, as if called here: with the settings that hold now, wherever it is called."""
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
