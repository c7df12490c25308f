"""What a context sets for the calls within it: the group to unpickle onto, checks between ranks, the gather budget."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

MIB = 2**20


@dataclass(frozen=True)
class Settings:
    """The settings of one context."""

    process_group: Any = None
    validate: bool = True
    gather_budget: int = MIB


_settings: ContextVar[Settings] = ContextVar("shardwise", default=Settings())  # noqa: B039 - frozen


def current() -> Settings:
    """The settings that hold here."""
    return _settings.get()


@contextmanager
def changed(**changes: Any) -> Iterator[None]:
    """Within this context, other settings."""
    token = _settings.set(replace(_settings.get(), **changes))
    try:
        yield
    finally:
        _settings.reset(token)


@contextmanager
def validation(enabled: bool) -> Iterator[None]:
    """Within this context, switch the checks between ranks on or off. Must be the same on every rank.

    Off saves a small collective in every factory and in ops that move data. Ranks that disagree are then no longer
    found out.
    """
    with changed(validate=enabled):
        yield


@contextmanager
def gather_budget(max_bytes: int) -> Iterator[None]:
    """Within this context, how many bytes of whole operands one op may gather on every rank; by default 1 MiB.

    An op without a rule that leaves shards apart is computed on the whole operands when they are within the budget, and
    raises otherwise. 0 means never. What does not count is an operand that is broadcast along what is cut and is no
    larger than a rank's share of the result: every rank needs all of it. Must be the same on every rank.
    """
    with changed(gather_budget=int(max_bytes)):
        yield
