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


def is_list(weights: object) -> bool:
    """Whether these may be the weights of several places: a sequence, or an array."""
    return (isinstance(weights, Sequence) and not isinstance(weights, str)) or getattr(weights, "ndim", 0) > 0


def parse_weights(weights: object, places: int | None = None) -> tuple[float, ...]:
    """The weights as plain numbers: one for each place, if it is known how many there are, and not all of them 0."""
    plain = weights.tolist() if hasattr(weights, "tolist") else weights
    if isinstance(plain, str) or not isinstance(plain, Sequence):
        raise SpecError(f"weights should be a sequence of numbers, one for each place, found {weights!r:.200}")
    numbers = [one.item() if hasattr(one, "item") and getattr(one, "ndim", 0) == 0 else one for one in plain]
    if (places is not None and len(numbers) != places) or not all(map(_is_weight, numbers)) or not any(numbers):
        needed = "weights should be" if places is None else f"{places} places need {places} weights, which are"
        raise SpecError(f"{needed} numbers >= 0 and not all 0; found {numbers!r:.200}")
    return tuple(numbers)


def _is_weight(one: object) -> bool:
    return isinstance(one, int | float) and one >= 0 and (isinstance(one, int) or math.isfinite(one))
