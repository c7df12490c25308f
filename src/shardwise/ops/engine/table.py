"""The table of aten ops: how each op, or one of its overloads, is computed.

Most ops have a rule, a few have a handler that calls other ops. The families of ops fill the table. Handlers of Python
functions are in `shardwise.tensor.dispatch.registry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwise.ops.engine.call import Aten, Call
from shardwise.ops.engine.compute import compute
from shardwise.ops.engine.gathered import may_gather
from shardwise.ops.engine.rule import Rule

AtenHandler = Callable[[Call], Any]  # gives NotImplemented for a call that it cannot compute
RuleMaker = Callable[[Call], Rule | None]

TABLE: dict[Any, AtenHandler] = {}
# Handlers of calls that no other computes, and whose operands exceed the gather budget: values say what travels where.
FALLBACKS: dict[Any, AtenHandler] = {}
DECOMPOSED_UNDER_AUTOCAST: set[Any] = set()  # overloads whose decomposition autocast casts, and not the op itself
DECOMPOSED_IF: dict[Any, Callable[[Call], bool]] = {}  # overloads whose handlers leave some calls to the decomposition


def find_handler(op: Aten) -> AtenHandler | None:
    """The handler of an overload: its own entry, else that of the op."""
    return TABLE.get(op) or TABLE.get(op.overloadpacket)


def by_rule(maker: RuleMaker) -> AtenHandler:
    """A handler that computes a call under the rule that ``maker`` gives for the call."""
    return lambda call: compute(call, maker(call))


def beyond_budget(handler: AtenHandler) -> AtenHandler:
    """A handler of calls whose operands exceed the gather budget; smaller ones are gathered, in one message."""
    return lambda call: NotImplemented if may_gather(call) else handler(call)


def compute_by_table(call: Call) -> Any:
    """The result of the op's handler, else of its fallback; NotImplemented if neither can compute the call."""
    handler = find_handler(call.op)
    result = NotImplemented if handler is None else handler(call)
    if result is not NotImplemented:
        return result
    fallback = FALLBACKS.get(call.op) or FALLBACKS.get(call.op.overloadpacket)
    return NotImplemented if fallback is None or may_gather(call) else fallback(call)


def add_rules(makers: Mapping[Any, RuleMaker]) -> None:
    """Add ops that are computed under rules."""
    TABLE.update({op: by_rule(maker) for op, maker in makers.items()})
