"""How many samples and which share of the states each row of ranks gets: the fastest that fits, by scipy's solver."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardwise.errors import PlanError
from shardwise.estimation.planning.curve import Curve
from shardwise.estimation.planning.probes import Costs

BUSY, TIE = 1e-3, 1e-5  # what the time in which the busiest row computes, and memory, count beside the time of a step
SPARE = 0.02  # of the memory that a plan leaves free: a prediction is not exact
HALVINGS = 50


@dataclass(frozen=True)
class Shares:
    """What each row gets, and what comes of it."""

    samples: tuple[int, ...]
    weights: tuple[float, ...]
    seconds: float
    lacking: float  # bytes that the row with the least memory lacks; at most 0 if all fits


def best_shares(
    costs: Sequence[Costs], memory: Sequence[int], samples: int, *, shared: bool, apart: bool, fewest: int = 0
) -> Shares:
    """The shares with the shortest step, for rows with these costs and memory; the least lacking one if none fits.

    If states are ``shared`` out, each row has a part of them, else all. If samples are ``apart``, each row has its own,
    at least the fewest.
    """
    problem = _Problem(costs, memory, samples, shared, apart, fewest)
    return _solve(problem, slack=False) or _solve(problem, slack=True) or _nothing(len(costs))


class _Problem(NamedTuple):
    """What `best_shares` is asked."""

    costs: Sequence[Costs]
    memory: Sequence[int]
    samples: int
    shared: bool
    apart: bool
    fewest: int


def _solve(problem: _Problem, *, slack: bool) -> Shares | None:
    """One mixed integer program. Its variables: samples of rows, shares of rows, seconds, bytes that are lacking, the
    seconds in which the busiest row computes, and the part of the memory that the fullest row uses: of plans that are
    as fast, as where all wait for transfers, the one that keeps most in reserve."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError as error:
        raise PlanError("plans.auto needs scipy, whose solver it asks: pip install 'shardwise[plan]'") from error
    costs, memory, samples, shared, apart, fewest = problem
    rows, unit = len(costs), float(max(memory))
    limit = [(1 - SPARE) * one / unit for one in memory]
    table, low, high = [], [], []
    seconds, lacking, busiest, fullest, variables = (2 * rows + k for k in range(5))

    def add(entries: dict[int, float], least: float, most: float) -> None:
        line = np.zeros(variables)
        for place, factor in entries.items():
            line[place] = factor
        table.append(line)
        low.append(least)
        high.append(most)

    for row, cost in enumerate(costs):
        for curve, time in ((cost.seconds, seconds), (cost.computing, busiest)):
            for line in curve.lines:
                add({row: -line.each, time: 1.0}, line.fixed, np.inf)
        for line in cost.memory.lines:
            used = {row: line.each / unit, rows + row: cost.states / unit, lacking: -1.0}
            add(used, -np.inf, limit[row] - line.fixed / unit)
            add({**used, lacking: 0.0, fullest: -limit[row]}, -np.inf, -line.fixed / unit)
    if apart:
        add(dict.fromkeys(range(rows), 1.0), samples, samples)
    if shared:
        add(dict.fromkeys(range(rows, 2 * rows), 1.0), 1.0, 1.0)
    least, most = np.zeros(variables), np.full(variables, np.inf)
    least[:rows] = fewest
    if not apart:
        least[:rows] = most[:rows] = samples
    most[rows : 2 * rows] = 1.0
    if not shared:
        least[rows : 2 * rows] = 1.0
    most[lacking] = np.inf if slack else 0.0
    goal = np.zeros(variables)
    longest = max(one.seconds.of(samples) for one in costs)
    goal[lacking if slack else seconds] = 1.0 if slack else 1.0 / longest
    goal[busiest] = BUSY / longest
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
    """A time that no plan can beat: all rows compute at once, without waiting, but not before hosts start the kernels.

    ``costs`` has for each way of making rows those of its rows; the fastest way counts.
    """
    return min(max(_least_of([one.computing for one in way], samples), *(one.host for one in way)) for way in costs)


def _least_of(rows: Sequence[Curve], samples: int) -> float:
    """The least seconds in which these rows together compute so many samples, found by halving."""
    low, high = 0.0, min(row.of(samples) for row in rows)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(row.samples_within(middle) for row in rows) >= samples else (middle, high)
    return low
