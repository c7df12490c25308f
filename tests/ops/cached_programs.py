"""The cached programs that a call runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.ops.engine.program import Program


def programs_run(function: Callable[..., Any], *args: Any) -> list[Program]:
    """The programs that the second of two calls runs; none where the call takes the slow path."""
    function(*args)
    seen: list[Program] = []
    run = Program.run

    def observed(program: Program, *arguments: Any) -> Any:
        seen.append(program)
        return run(program, *arguments)

    Program.run = observed
    try:
        function(*args)
    finally:
        Program.run = run
    return seen
