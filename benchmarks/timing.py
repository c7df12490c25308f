"""How everything is timed: warmed up, interleaved, best of several."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

Work = Callable[[], object]


def seconds_per_call(work: Work, calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - begin) / calls


def best_of(contenders: Mapping[str, Work], *, calls: int, repeats: int = 9) -> dict[str, float]:
    """The fastest of several rounds for each contender; every round runs them all, so all meet the same noise."""
    for work in contenders.values():
        seconds_per_call(work, max(calls // 10, 1))
    best = dict.fromkeys(contenders, float("inf"))
    gc.disable()
    try:
        for _ in range(repeats):
            for name, work in contenders.items():
                best[name] = min(best[name], seconds_per_call(work, calls))
    finally:
        gc.enable()
    return best
