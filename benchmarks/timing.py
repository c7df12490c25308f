"""How everything is timed: warmed up, interleaved, best of several."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

Work = Callable[[], object]


def seconds_per_call(work: Work, calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - begin) / calls


def best_of(contenders: Mapping[str, Work], *, calls: int, repeats: int = 9) -> dict[str, float]:
    """The fastest of several rounds for each contender.

    Every round runs them all, so all meet the same noise, and begins with another one, so none always follows the same.
    """
    for work in contenders.values():
        seconds_per_call(work, max(calls // 10, 1))
    best = dict.fromkeys(contenders, float("inf"))
    gc.disable()
    try:
        for number in range(repeats):
            for name, work in _beginning_with(number, contenders):
                best[name] = min(best[name], seconds_per_call(work, calls))
    finally:
        gc.enable()
    return best


def _beginning_with(number: int, contenders: Mapping[str, Work]) -> list[tuple[str, Work]]:
    """All contenders in a circle."""
    each = list(contenders.items())
    first = number % len(each)
    return each[first:] + each[:first]


def least_processor_time(contenders: Mapping[str, Work], *, warm_up: int, steps: int) -> dict[str, float]:
    """The least processor time of a call of each contender; they take turns, after some calls that do not count."""
    best = dict.fromkeys(contenders, float("inf"))
    for number in range(warm_up + steps):
        for name, work in _beginning_with(number, contenders):
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.synchronize()  # else a step would wait for what the last one has queued
            begin = time.process_time()
            work()
            if number >= warm_up:
                best[name] = min(best[name], time.process_time() - begin)
    return best


def best_together(contenders: Mapping[str, Work], repeats: int = 9) -> dict[str, float]:
    """As `best_of`, for collectives: all ranks begin together, and each round ends when the last one is done."""

    def together(work: Work) -> Work:
        def run() -> object:
            result = work()
            dist.barrier()
            return result

        return run

    return best_of({name: together(work) for name, work in contenders.items()}, calls=1, repeats=repeats)


def both_together(contenders: Mapping[str, Work], repeats: int = 9) -> tuple[dict[str, float], dict[str, float]]:
    """As `best_together`; and the time of the processors of all ranks together, which says more on a busy machine."""
    spent = dict.fromkeys(contenders, float("inf"))

    def counted(name: str, work: Work) -> Work:
        def run() -> object:
            begin = time.process_time()
            result = work()
            device = "cuda" if dist.get_backend() == "nccl" else "cpu"
            seconds = torch.tensor(time.process_time() - begin, device=device)
            dist.all_reduce(seconds)
            spent[name] = min(spent[name], seconds.item())
            return result

        return run

    return best_together({name: counted(name, work) for name, work in contenders.items()}, repeats), spent
