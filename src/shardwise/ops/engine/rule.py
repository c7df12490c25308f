"""`Rule`: which dims of an op's operands and results correspond, and which of them may be cut.

A rule reads like an einsum. ``mm`` is ``ik, kj -> ij``: each letter is a label, each label has a size, and where a
label is cut, every operand and result with the label is cut at the same place. A label may need to be whole (softmax
needs whole rows); a label that no result has is reduced, and the rule says how partial results are combined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch


class Along(NamedTuple):
    """A dim with a label: ``unit`` elements of the dim are one step of the label."""

    label: int
    unit: int = 1


Dims = tuple[Along | None, ...]  # None: a dim of one element, or one that is as long in every cell


@dataclass(frozen=True, eq=False)
class PartialReduction:
    """How partial results over a cut label are combined.

    ``partial`` computes what a cell contributes, by default the op itself. ``combine`` gets the contributions of all
    cells, stacked along a new first dim, with ``fill_values`` where a cell contributes nothing.
    """

    combine: Callable[[Any, list[torch.Tensor]], Any]
    fill_values: Callable[[torch.dtype], tuple[Any, ...]]
    partial: Callable[[Any, list[torch.Tensor]], tuple[torch.Tensor, ...]] | None = None
    is_sum: bool = False  # whether the op's own partial results are added up: then they need no stack


@dataclass(frozen=True)
class Rule:
    """Labels of the dims of every operand and every result of one call."""

    sizes: tuple[int, ...]  # of each label
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    whole: frozenset[int] = frozenset()  # labels that must not be cut
    reduction: PartialReduction | None = None  # if None, labels that no result has must not be cut either
    allows_empty: bool = False  # whether the op can be called on empty cells, and gives empty results
    contiguous: bool = False  # whether its kernels need contiguous operands
    # Arguments of the local call that differ between cells: a function of the call and the sizes of the cell's results.
    adapt: Callable[[Any, list[list[int]]], dict[str, Any]] | None = field(default=None, compare=False)

    def result_labels(self) -> set[int]:
        """Labels that the first result has."""
        return {along.label for along in self.results[0] if along is not None} if self.results else set()

    def cuttable(self) -> list[int]:
        """Labels that may be cut, longest first."""
        allowed = set(range(len(self.sizes))) - self.whole
        if self.reduction is None:
            allowed &= self.result_labels()
        return sorted(allowed, key=lambda label: (-self.sizes[label], label))


class Labels:
    """Makes the labels of a rule."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.whole: set[int] = set()

    def new(self, size: int, *, whole: bool = False) -> Along:
        """A label of this size."""
        self.sizes.append(size)
        if whole:
            self.whole.add(len(self.sizes) - 1)
        return Along(len(self.sizes) - 1)

    def dims(self, shape: Sequence[int], *, whole: Iterable[int] = ()) -> list[Along | None]:
        """A new label for each dim; the dims ``whole`` must be whole."""
        ndim = len(shape)
        uncut = {dim % ndim for dim in whole} if ndim else set()
        return [self.new(size, whole=dim in uncut) for dim, size in enumerate(shape)]

    def rule(
        self, operands: Iterable[Sequence[Along | None]], results: Iterable[Sequence[Along | None]], **more: Any
    ) -> Rule:
        """The rule with these labels."""
        return Rule(
            tuple(self.sizes), tuple(map(tuple, operands)), tuple(map(tuple, results)), frozenset(self.whole), **more
        )


broadcast_shapes: Callable[..., torch.Size] = torch.broadcast_shapes  # declared without types by torch


def broadcast(shapes: Sequence[Sequence[int]], labels: Labels | None = None) -> tuple[Labels, list[Dims], Dims]:
    """Labels, the dims of operands that are broadcast against each other, and the dims of the result."""
    labels = labels or Labels()
    result = broadcast_shapes(*shapes) if shapes else torch.Size()
    out = tuple(labels.new(size) for size in result)
    operands = [
        tuple(
            None if size == 1 and result[len(result) - len(shape) + dim] != 1 else out[len(result) - len(shape) + dim]
            for dim, size in enumerate(shape)
        )
        for shape in shapes
    ]
    return labels, operands, out
