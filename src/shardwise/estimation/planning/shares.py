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
from shardwise.estimation.planning.candidate import usable
from shardwise.estimation.planning.curve import Curve
from shardwise.estimation.planning.probes import Costs

BUSY, TIE = 1e-3, 1e-5  # what the time in which the busiest row computes, and memory, count beside the time of a step
TOLERANCE = 1e-6  # of the solver: a row may come out fuller by this part of its memory
HALVINGS = 50


@dataclass(frozen=True)
class Shares:
    """What each row gets, and what comes of it."""

    samples: tuple[int, ...]
    weights: tuple[float, ...]
    seconds: float
    lacking: float  # bytes that the row with the least memory lacks; at most 0 if all fits


def best_shares(
    costs: Sequence[Costs], memory: Sequence[int], samples: int, *, shared: bool, fewest: int = 0
) -> Shares | None:
    """The shares with the shortest step, for rows with these costs and memory; the least lacking ones if none fit.

    If states are ``shared`` out, each row has a part of them, else all. Each row has at least the fewest samples; None
    if there are not as many.
    """
    limits = [usable(one) for one in memory]
    alike: dict[tuple[Costs, int], list[int]] = {}
    for row, key in enumerate(zip(costs, limits, strict=True)):
        alike.setdefault(key, []).append(row)
    kinds = [_Kind(*key, len(rows)) for key, rows in alike.items()]
    problem = _Problem(kinds, samples, shared, fewest)
    totals = _solve(problem, slack=False) or _solve(problem, slack=True)
    if totals is None:
        return None
    counts = [0] * len(costs)
    for total, rows in zip(totals, alike.values(), strict=True):
        for number, row in enumerate(rows):
            counts[row] = total // len(rows) + (number < total % len(rows))
    weights = _weights(costs, limits, counts) if shared else (1.0,) * len(costs)
    used = [cost.used(count, weight) for cost, count, weight in zip(costs, counts, weights, strict=True)]
    lacking = max(use - limit for use, limit in zip(used, limits, strict=True))
    slowest = max(cost.seconds.of(count) for cost, count in zip(costs, counts, strict=True))
    return Shares(tuple(counts), weights, slowest, lacking)


class _Kind(NamedTuple):
    """Rows that are alike: their samples differ by one at most."""

    cost: Costs
    limit: int  # bytes that a plan may use of each
    rows: int


class _Problem(NamedTuple):
    """What `best_shares` is asked."""

    kinds: Sequence[_Kind]
    samples: int
    shared: bool
    fewest: int


def _solve(problem: _Problem, *, slack: bool) -> list[int] | None:
    """The samples of each kind of rows together, by one mixed integer program; None if it has no solution.

    Its variables: samples of each kind together, the most that one row of it has, and its share of the states; seconds,
    the seconds in which the busiest row computes, and the part of the usable memory that the fullest row needs: of
    plans that are as fast, as where all wait for transfers, the one that keeps most in reserve. With ``slack``, rows
    may be too full, and the solution is the one in which the fullest is least so.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError as error:
        raise PlanError("plans.auto needs scipy, whose solver it asks: pip install 'shardwise[plan]'") from error
    kinds, samples, shared, fewest = problem
    first_most, first_share = len(kinds), 2 * len(kinds)
    seconds, busiest, fullest, variables = (3 * len(kinds) + k for k in range(4))
    unit = max(kind.cost.seconds.of(samples) for kind in kinds) or 1.0  # of times
    table, low = [], []

    def at_least(bound: float, entries: dict[int, float]) -> None:
        line = np.zeros(variables)
        for place, factor in entries.items():
            line[place] = factor
        table.append(line)
        low.append(bound)

    several = sum(kind.rows for kind in kinds) > 1
    least, highest = np.zeros(variables), np.full(variables, np.inf)
    for number, (cost, limit, rows) in enumerate(kinds):
        total, most, share = number, first_most + number, first_share + number
        at_least(0.0, {most: rows, total: -1.0})
        for curve, time in ((cost.seconds, seconds), (cost.computing, busiest)):
            for line in curve.lines:
                at_least(line.fixed / unit, {time: 1.0, most: -line.each / unit})
        # A row fits by itself; and rows that are alike fit together, for each takes as much of the states as it can.
        own = 0.0 if shared else cost.states
        for line in cost.memory.lines:
            at_least((line.fixed + own) / limit, {fullest: 1.0, most: -line.each / limit})
            together = {fullest: rows, total: -line.each / limit, share: -cost.states / limit}
            at_least(rows * line.fixed / limit, together)
        in_step = (cost.states + cost.step.each) / limit
        at_least(rows * cost.step.fixed / limit, {fullest: rows, share: -in_step})
        least[total] = rows * fewest
        if samples > 1 and several:  # where one row has all samples, units are not tried on local ones, and are slower
            highest[most] = samples - 1
        least[share], highest[share] = (0.0, 1.0) if shared else (rows, rows)
    sums = np.zeros((2, variables))
    sums[0, : len(kinds)] = sums[1, first_share : 3 * len(kinds)] = 1.0
    states = 1.0 if shared else sum(kind.rows for kind in kinds)
    highest[fullest] = np.inf if slack else 1.0 - TOLERANCE
    goal = np.zeros(variables)
    goal[seconds], goal[busiest], goal[fullest] = (0.0, BUSY, 1.0) if slack else (1.0, BUSY, TIE)
    goal /= TIE  # the solver leaves a small gap, whatever the goal is
    whole = np.zeros(variables)
    whole[:first_share] = 1.0
    rules = [LinearConstraint(np.array(table), low), LinearConstraint(sums, [samples, states], [samples, states])]
    with _without_stdout():
        solved: Any = milp(
            goal,
            constraints=rules,
            integrality=whole,
            bounds=Bounds(least, highest),
            options={"mip_rel_gap": 0.0},
        )
    return None if solved.x is None else [round(one) for one in solved.x[: len(kinds)]]


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


def _weights(costs: Sequence[Costs], limits: Sequence[int], counts: Sequence[int]) -> tuple[float, ...]:
    """Which part of the states each row has: the same if that fits, for equal stretches are gathered fastest; else as
    much as makes all rows equally full."""
    even = 1.0 / len(costs)
    rows = list(zip(costs, counts, limits, strict=True))
    if not costs[0].states or all(cost.used(count, even) <= limit for cost, count, limit in rows):
        return (even,) * len(costs)

    def shares(full: float) -> list[float]:
        return [cost.share_within(count, full * limit) for cost, count, limit in rows]

    low, high = 0.0, max(cost.used(count, 1.0) / limit for cost, count, limit in rows)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(shares(middle)) >= 1.0 else (middle, high)
    found = shares(high)
    return tuple(share / sum(found) for share in found)


def least_seconds(costs: Sequence[Costs], samples: int) -> float:
    """The time in which rows with these costs compute all samples at once, without waiting, but not before hosts start
    the kernels."""
    return max(_least_of([one.computing for one in costs], samples), *(one.host for one in costs))


def _least_of(rows: Sequence[Curve], samples: int) -> float:
    """The least seconds in which these rows together compute so many samples, found by halving."""
    low, high = 0.0, min(row.of(samples) for row in rows)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(row.samples_within(middle) for row in rows) >= samples else (middle, high)
    return low
