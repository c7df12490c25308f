"""`fit_line`: the `Rate` that fits measured points best, and how far it is off."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from shardwise.errors import DeviceError
from shardwise.estimation.devices.device import Rate

Points = Sequence[tuple[float, float]]  # an amount, and the seconds that it took


def fit_line(points: Points) -> Rate:
    """The line with the least squares of relative errors, so that a small amount counts as much as a large one.

    A line that would start below 0 starts at 0. Where more takes no longer, all of the time goes with the amount.

    >>> rate = fit_line([(10, 2.0), (20, 3.0), (40, 5.0)])
    >>> round(rate.start, 6), round(rate.per_second, 6)
    (1.0, 10.0)
    """
    if not points or any(amount <= 0 or seconds <= 0 for amount, seconds in points):
        raise DeviceError(f"no line fits {list(points)}: amounts and seconds above 0 are needed")
    # Of relative errors: the sum of (start * u + slope * v - 1)² is to be the least, with u = 1 / t and v = x / t.
    u = [1 / seconds for _, seconds in points]
    v = [amount / seconds for amount, seconds in points]
    uu, uv, vv = _dot(u, u), _dot(u, v), _dot(v, v)
    determinant = uu * vv - uv * uv
    if determinant > 1e-12 * uu * vv:
        start, slope = (sum(u) * vv - sum(v) * uv) / determinant, (sum(v) * uu - sum(u) * uv) / determinant
        if start >= 0 and slope > 0:
            return Rate(1 / slope, start)
    return Rate(vv / sum(v))


def median_error(rate: Rate, points: Points) -> float:
    """How far the rate is off at these points: the median of the relative errors."""
    return statistics.median(abs(rate.seconds(amount) / seconds - 1) for amount, seconds in points)


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
