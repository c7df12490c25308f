"""Which aten op is computed how: one table, by the op or by one of its overloads.

Most ops have a rule, which says which dims go together; a few have a handler that calls other ops. Families of ops put
both here. The functions of Python that come down to them are in `dispatch.registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwise.ops.engine.call import Aten, Call
from shardwise.ops.engine.compute import compute
from shardwise.ops.engine.rule import Rule

Handler = Callable[[Call], Any]  # gives NotImplemented for a call that it cannot compute
RuleMaker = Callable[[Call], Rule | None]

TABLE: dict[Any, Handler] = {}
CAST_WITHIN: set[Any] = set()  # overloads that are broken down where autocast is on, which casts what they come down to


def handler_of(op: Aten) -> Handler | None:
    """What computes an overload; its own entry, else that of the op."""
    return TABLE.get(op) or TABLE.get(op.overloadpacket)


def by_rule(maker: RuleMaker) -> Handler:
    """A handler that computes calls under the rule which this function makes for them."""

    def handler(call: Call) -> Any:
        rule = maker(call)
        return NotImplemented if rule is None else compute(call, rule)

    return handler


def add_rules(makers: Mapping[Any, RuleMaker]) -> None:
    """Compute ops under rules."""
    TABLE.update({op: by_rule(maker) for op, maker in makers.items()})
