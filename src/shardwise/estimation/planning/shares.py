"""How many samples and which share of the states each row of ranks gets: the fastest that fits, by scipy's solver."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.errors import PlanError
from shardwise.estimation.planning.probes import Costs

TIE = 1e-5  # what memory counts, beside time
SPARE = 0.02  # of the memory that a plan leaves free: a prediction is not exact


@dataclass(frozen=True)
class Shares:
    """What each row gets, and what comes of it."""

    samples: tuple[int, ...]
    weights: tuple[float, ...]
    seconds: float
    lacking: float  # bytes that the row with the least memory lacks; at most 0 if all fits


def best_shares(costs: Sequence[Costs], memory: Sequence[int], samples: int, *, shared: bool, apart: bool) -> Shares:
    """The shares with the shortest step, for rows with these costs and memory; the least lacking one if none fits.

    If states are ``shared`` out, each row has a part of them, else all. If samples are ``apart``, each row has its own.
    """
    found = _solve(costs, memory, samples, shared=shared, apart=apart, slack=False)
    return found or _solve(costs, memory, samples, shared=shared, apart=apart, slack=True) or _nothing(len(costs))


def _solve(
    costs: Sequence[Costs], memory: Sequence[int], samples: int, *, shared: bool, apart: bool, slack: bool
) -> Shares | None:
    """One mixed integer program. Its variables: samples of rows, shares of rows, seconds, bytes that are lacking, and
    the part of the memory that the fullest row uses: of plans that are as fast, the one that leaves most."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError as error:
        raise PlanError("plans.auto needs scipy, whose solver it asks: pip install 'shardwise[plan]'") from error
    rows, unit = len(costs), float(max(memory))
    limit = [(1 - SPARE) * one / unit for one in memory]
    table, low, high = [], [], []
    seconds, lacking, fullest, variables = 2 * rows, 2 * rows + 1, 2 * rows + 2, 2 * rows + 3

    def add(entries: dict[int, float], least: float, most: float) -> None:
        line = np.zeros(variables)
        for place, factor in entries.items():
            line[place] = factor
        table.append(line)
        low.append(least)
        high.append(most)

    for row, cost in enumerate(costs):
        add({row: -cost.seconds.each, seconds: 1.0}, cost.seconds.fixed, np.inf)
        used = {row: cost.memory.each / unit, rows + row: cost.states / unit, lacking: -1.0}
        add(used, -np.inf, limit[row] - cost.memory.fixed / unit)
        add({**used, lacking: 0.0, fullest: -limit[row]}, -np.inf, -cost.memory.fixed / unit)
    if apart:
        add(dict.fromkeys(range(rows), 1.0), samples, samples)
    if shared:
        add(dict.fromkeys(range(rows, 2 * rows), 1.0), 1.0, 1.0)
    least, most = np.zeros(variables), np.full(variables, np.inf)
    if not apart:
        least[:rows] = most[:rows] = samples
    most[rows : 2 * rows] = 1.0
    if not shared:
        least[rows : 2 * rows] = 1.0
    most[lacking] = np.inf if slack else 0.0
    goal = np.zeros(variables)
    goal[lacking if slack else seconds] = 1.0 if slack else 1.0 / max(one.seconds.of(samples) for one in costs)
    goal[fullest] = TIE
    whole = np.array([1.0] * rows + [0.0] * (variables - rows))
    rules = LinearConstraint(np.array(table), low, high)
    with _without_stdout():
        solved: Any = milp(goal, constraints=rules, integrality=whole, bounds=Bounds(least, most))
    if solved.x is None:
        return None
    counts = tuple(round(one) for one in solved.x[:rows])
    weights = tuple(float(one) for one in solved.x[rows : 2 * rows])
    counts, weights = _alike_evened(counts, weights, costs, memory)
    slowest = max(cost.seconds.of(count) for cost, count in zip(costs, counts, strict=True))
    return Shares(
        counts,
        _evened(weights, costs, counts, limit, unit) if shared else weights,
        slowest,
        float(solved.x[lacking]) * unit,
    )


@contextmanager
def _without_stdout() -> Iterator[None]:
    """Within this context, what compiled code prints is dropped: the solver prints a line now and then, though it is
    asked not to."""
    flush = ctypes.CDLL(None).fflush  # what was printed is in a buffer of the C library, too
    with suppress(OSError, ValueError, AttributeError):  # without a stdout, nothing is printed
        sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:
        yield
        return
    with open(os.devnull, "w") as nowhere:
        flush(None)
        os.dup2(nowhere.fileno(), 1)
        try:
            yield
        finally:
            flush(None)
            os.dup2(kept, 1)
            os.close(kept)


def _alike_evened(
    counts: tuple[int, ...], weights: tuple[float, ...], costs: Sequence[Costs], memory: Sequence[int]
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The same together, and of rows that are alike about the same each: the solver takes any that is as fast."""
    alike: dict[tuple[Costs, int], list[int]] = {}
    for row, key in enumerate(zip(costs, memory, strict=True)):
        alike.setdefault(key, []).append(row)
    samples, shares = list(counts), list(weights)
    for members in alike.values():
        total, weight = sum(counts[row] for row in members), sum(weights[row] for row in members)
        for number, row in enumerate(members):
            samples[row] = total // len(members) + (number < total % len(members))
            shares[row] = weight / len(members)
    return tuple(samples), tuple(shares)


def _evened(
    weights: tuple[float, ...], costs: Sequence[Costs], counts: Sequence[int], limit: Sequence[float], unit: float
) -> tuple[float, ...]:
    """The same for all rows, if that fits as well: equal stretches are gathered fastest."""
    even = 1.0 / len(weights)
    for cost, count, most in zip(costs, counts, limit, strict=True):
        if cost.memory.of(count) + cost.states * even > most * unit:
            return weights
    return tuple(even for _ in weights)


def _nothing(rows: int) -> Shares:
    return Shares((0,) * rows, (1.0 / rows,) * rows, float("inf"), float("inf"))


def least_seconds(costs: Sequence[Sequence[Costs]], samples: int) -> float:
    """A time that no plan can beat: all rows compute at once, without waiting, each by its fastest way.

    ``costs`` has for each way of making rows those of its rows.
    """
    return min(samples / sum(1.0 / max(one.computing.each, 1e-12) for one in way) for way in costs)
