"""`ranks`: a test that runs on real ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

from shardwise.testing.pool import TIMEOUT, run_on_ranks

P = ParamSpec("P")


def ranks(
    world_size: int, *, timeout: float = TIMEOUT, fresh: bool = False, bare: bool = False, backend: str = "gloo"
) -> Callable[[Callable[P, Any]], Callable[P, None]]:
    """Decorator: call the function on ``world_size`` ranks, whose default process group is initialised.

    The arguments that pytest passes (parameters, fixtures) are sent to every rank, so they must be picklable::

        @ranks(4)
        def test_zeros() -> None:
            spec = ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(4)])
            assert zeros(spec, 8, 2).local_tensor().shape == (2, 2)

    The group is of this backend; with ``nccl``, ranks may share a GPU. With ``fresh``, the test gets new processes of
    its own; with ``bare``, processes that started without torch's tracer and what it imports. A rank that raises or
    hangs fails the test with that rank's own traceback, or with every hung rank's stack.
    """

    def decorate(function: Callable[P, Any]) -> Callable[P, None]:
        @functools.wraps(function)
        def on_ranks(*args: P.args, **kwargs: P.kwargs) -> None:
            __tracebackhide__ = True  # pytest then shows only the rank's own traceback
            run_on_ranks(
                world_size,
                function,
                *args,
                timeout=timeout,
                fresh=fresh,
                bare=bare,
                echo=False,
                backend=backend,
                **kwargs,
            )

        on_ranks.on_this_rank = function  # type: ignore[attr-defined] # what a rank runs
        return on_ranks

    return decorate
