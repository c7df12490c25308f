"""Programs of calls: what a call comes down to is worked out once, for all calls of its kind.

Which plain ops a call makes of the shards that are here, what moves between ranks for it, and how its results are
wrapped, depends on layouts, dtypes, settings and numbers, never on the tensors' values. So the first call of its kind
is watched; if all that came of it are pure functions of the local tensors, and transfers, later calls of the same kind
run just these, and draw random numbers anew where the first one did. Whatever is not as simple (something was written
or looked at) goes the long way each time. All
ranks talk alike, whether they run a program or work it out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.meeting import traffic
from shardwise.ops.engine.call import function
from shardwise.ops.engine.kind import Unfit, kind_of
from shardwise.ops.engine.program import Program
from shardwise.ops.engine.recorder import Recorder, recording, watch
from shardwise.ops.engine.steps import Noise

MOST = 4096  # programs that are kept

_mode_is_active = torch._C._is_torch_function_mode_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack


def remembered(op: Any, args: Sequence[Any], kwargs: dict[str, Any], long_way: Callable[..., Any]) -> Any:
    """What ``long_way(op, args, kwargs)`` gives."""
    if watch.current is not None or _mode_is_active() or _dispatch_modes():
        return long_way(op, args, kwargs)
    try:
        kind = kind_of(op, args, kwargs)
    except Unfit:
        return long_way(op, args, kwargs)
    program = _programs.get(kind, _UNKNOWN)
    if program is None:
        return long_way(op, args, kwargs)
    if program is not _UNKNOWN:
        return program.run(args, kwargs)
    return _first_time(kind, op, args, kwargs, long_way)


_programs: dict[Any, Program | None] = {}  # None for a kind of call that goes the long way
_UNKNOWN: Any = object()


def _first_time(kind: Any, op: Any, args: Sequence[Any], kwargs: dict[str, Any], long_way: Callable[..., Any]) -> Any:
    recorder = Recorder(args, kwargs, inside=function.called is not None)
    drawn, talked = _random_states(), traffic.count
    with recording(recorder):
        result = long_way(op, args, kwargs)
    draws = any(isinstance(step.op, Noise) for step in recorder.steps)
    again = traffic.count == talked + recorder.talked and (draws or _same(drawn, _random_states()))
    if len(_programs) >= MOST:
        for old in list(_programs)[: MOST // 4]:
            _programs.pop(old, None)
    _programs[kind] = recorder.program(result) if again else None
    return result


def _random_states() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # torch's
    return states + ([torch.cuda.get_rng_state()] if cuda else [])


def _same(states: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(states) == len(others) and all(torch.equal(*pair) for pair in zip(states, others, strict=True))
