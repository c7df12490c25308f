"""A dim cut in proportion to weights, for ranks that are not equal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from shardwise.errors import SpecError


def weighted_sizes(dim_size: int, weights: Sequence[float]) -> list[int]:
    """Whole sizes that add up to the dim, each less than one element from its exact share.

    Every edge lies where its share ends, rounded to the next element. All of it is exact, so every rank finds the same.
    """
    shares = [Fraction(weight) for weight in weights]
    total = sum(shares)
    edges = [0, *(math.floor(dim_size * share / total + Fraction(1, 2)) for share in accumulate(shares))]
    return [end - begin for begin, end in pairwise(edges)]


def parse_weights(weights: object, places: int) -> tuple[float, ...]:
    """One weight for each place, not all of them 0."""
    if isinstance(weights, str) or not isinstance(weights, Sequence):
        raise SpecError(f"weights should be a sequence of numbers, one for each place, found {weights!r}")
    usable = all(isinstance(one, int | float) and math.isfinite(one) and one >= 0 for one in weights)
    if len(weights) != places or not usable or not any(weights):
        raise SpecError(
            f"{places} places need {places} weights, which are numbers >= 0 and not all 0; found {list(weights)!r:.200}"
        )
    return tuple(weights)
