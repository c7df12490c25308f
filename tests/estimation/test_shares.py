"""Shares of samples and states: they fit if any do, and no sample moved to another row makes the step shorter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.estimation.test_auto import BATCH, device, model

from shardwise import plans
from shardwise.errors import PlanError
from shardwise.estimation.planning import Candidate
from shardwise.estimation.planning.candidate import usable
from shardwise.estimation.planning.curve import Curve, Line
from shardwise.estimation.planning.probes import Costs
from shardwise.estimation.planning.shares import BUSY, Shares, best_shares, least_seconds


def curves(fixed: st.SearchStrategy[float], each: st.SearchStrategy[float]) -> st.SearchStrategy[Curve]:
    """Of up to three lines."""
    return st.builds(Curve, st.lists(st.builds(Line, fixed, each), min_size=1, max_size=3).map(tuple))


COSTS = st.builds(
    Costs,
    curves(st.floats(0, 1), st.floats(0.01, 1)),
    curves(st.just(0.0), st.floats(0.001, 0.01)),
    curves(st.floats(0, 1e9), st.floats(0, 1e8)),
    st.just(4e9),
)


def shares(costs: Sequence[Costs], sizes: Sequence[int], samples: int, *, shared: bool = True) -> Shares:
    """The best ones, of which there are some."""
    found = best_shares(costs, sizes, samples, shared=shared)
    assert found is not None
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(COSTS, st.integers(1, 2)), min_size=1, max_size=3), st.integers(1, 40), st.integers(1, 8))
def test_shares(kinds: list[tuple[Costs, int]], samples: int, memory: int) -> None:
    """They fit, they are all, and no sample moved to another row makes the step shorter."""
    costs = [cost for cost, rows in kinds for _ in range(rows)]
    sizes = [memory * 10**9] * len(costs)
    found = shares(costs, sizes, samples)
    assert sum(found.samples) == samples
    assert sum(found.weights) == pytest.approx(1)
    used = [cost.used(count, weight) for cost, count, weight in zip(costs, found.samples, found.weights, strict=True)]
    limit = usable(sizes[0])
    assert found.lacking == pytest.approx(max(used) - limit)
    assert least_seconds(costs, samples) <= found.seconds * (1 + 1e-6)
    slowest = max(range(len(costs)), key=lambda row: costs[row].seconds.of(found.samples[row]))
    if found.lacking > 0 or not found.samples[slowest]:
        return
    for row, cost in enumerate(costs):
        count = found.samples[row] + 1
        room = sum(limit - use for use in used) - cost.memory.of(count) + cost.memory.of(count - 1)
        if row != slowest and count < samples and cost.used(count, found.weights[row]) <= limit and room > 0:
            moved = [*found.samples]
            moved[row], moved[slowest] = count, moved[slowest] - 1
            step = max(each.seconds.of(number) for each, number in zip(costs, moved, strict=True))
            assert step >= found.seconds * (1 - 2 * BUSY)


LINE = st.builds(lambda line: Curve((line,)), st.builds(Line, st.floats(0, 2e9), st.floats(0, 1e9)))
STEPS = st.builds(Line, st.just(0.0), st.floats(0, 2e9))
ROWS = st.tuples(st.builds(replace, COSTS, memory=LINE, step=STEPS), st.integers(1, 3))


@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=2), st.integers(2, 6), st.integers(2, 8))
def test_shares_fit_if_any_do(kinds: list[tuple[Costs, int]], samples: int, memory: int) -> None:
    """Whatever samples the rows have, the states do not fit beside them where the shares lack memory."""
    costs = [cost for cost, rows in kinds for _ in range(rows)]
    sizes = [memory * 10**9] * len(costs)
    if shares(costs, sizes, samples).lacking <= 0:
        return
    most = samples if len(costs) == 1 else samples - 1
    limit = usable(sizes[0]) * (1 - 1e-5)
    for counts in product(range(most + 1), repeat=len(costs)):
        fits = all(cost.memory.of(count) <= limit for cost, count in zip(costs, counts, strict=True))
        if sum(counts) == samples and fits:
            pairs = zip(costs, counts, strict=True)
            assert sum(cost.share_within(count, limit) for cost, count in pairs) < 1, counts


def test_rows_that_are_alike_with_samples_that_are_not() -> None:
    """Of two equal rows, the one with fewer samples has more of the states, where even shares do not fit."""
    each = Curve((Line(0, 0.1),))
    cost = Costs(each, each, Curve((Line(1e9, 10e9),)), 14e9)
    found = shares([cost] * 2, [24 * 10**9] * 2, 3)
    assert found.samples == (2, 1)
    assert found.weights == pytest.approx((1 / 7, 6 / 7))
    assert found.lacking < 0
    assert shares([cost] * 2, [40 * 10**9] * 2, 3).weights == (0.5, 0.5)


def test_a_row_has_not_all_samples() -> None:
    """Beside other rows, however slow they are: alone it would not compute as it does beside others."""
    fast, slow = Curve((Line(0, 0.1),)), Curve((Line(0, 1e3),))
    none = Curve((Line(0, 0),))
    found = shares([Costs(slow, slow, none, 1e9), Costs(fast, fast, none, 1e9)], [10**10] * 2, 64)
    assert found.samples == (1, 63)
    assert shares([Costs(fast, fast, none, 1e9)], [10**10], 64).samples == (64,)


def test_what_a_plan_leaves_free_is_lacking() -> None:
    """A plan that takes nearly all of the memory does not fit, and is told to lack what it should leave free."""
    one = Candidate("replicated", 1, (1,), None, needed=(99, 98), memory=(100, 100))
    assert one.lacking == {0: 1}
    roomy = plans.auto(model(), devices=[device("one", 1e9)], batch=BATCH, recompute=False)
    memory = int(roomy.chosen.needed[0] / 0.99)
    with pytest.raises(PlanError, match=r"rank 0 \(one\) lacks"):
        plans.auto(model(), devices=[device("one", 1e9, memory)], batch=BATCH, recompute=False)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=8))
def test_curves(values: list[float]) -> None:
    """Costs never fall, are no larger than the largest so far, and tell how many samples a cost allows."""
    counts = [3 * k for k in range(len(values))]
    found = Curve.through(counts, values)
    costs = [found.of(count) for count in range(counts[-1] + 1)]
    assert all(one <= other + 1e-6 for one, other in pairwise(costs))
    for k, count in enumerate(counts):
        assert found.of(count) <= max(values[: k + 1]) + 1e-6
        within = found.samples_within(found.of(count))
        assert found.of(min(within, 1e6)) <= found.of(count) + 1e-6
        assert within >= count - 1e-6 * max(count, 1)
    convex = sorted(values)
    steps = [sum(convex[:k]) for k in range(len(convex) + 1)]
    exact = Curve.through(list(range(len(steps))), steps)
    assert [exact.of(k) for k in range(len(steps))] == pytest.approx(steps, abs=1e-6)


def test_a_replica_has_all_states() -> None:
    """States that are not shared out are on every row."""
    each = Curve((Line(0, 1),))
    cost = Costs(each, each, Curve((Line(0, 0),)), 5e8)
    found = shares([cost] * 2, [10**9] * 2, 4, shared=False)
    assert found.weights == (1.0, 1.0)
    assert found.lacking <= 0
    assert shares([replace(cost, states=2e9)] * 2, [10**9] * 2, 4, shared=False).lacking > 0
