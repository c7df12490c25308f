"""`compare`: how far the values of two stored tensors are apart, read one part at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shardwise.checkpoint.archive.blocks import Blocks
from shardwise.tools.cli.contents import HeldTensor

WORKSPACE = 40  # bytes for each compared element, beyond the two that are read


@dataclass
class Difference:
    """The difference between the values of two tensors."""

    elements: int = 0  # that differ by more than the tolerance
    largest: float = 0.0  # of those
    at: list[int] | None = None  # the index of the largest difference
    squares_apart: float = 0.0  # the sum of |a - b|², of all elements
    squares: float = 0.0  # the sum of |b|², of all elements that are finite

    @property
    def relative(self) -> float:
        """The norm of a - b by that of b, so that single elements near zero do not count for much."""
        if not self.squares_apart:
            return 0.0
        return math.sqrt(self.squares_apart / self.squares) if self.squares else math.inf


def compare(
    mine: HeldTensor, theirs: HeldTensor, rtol: float, atol: float, max_memory: int, on_read: Callable[[int], object]
) -> Difference:
    """Compare two tensors of the same size, one part at a time."""
    size, result = mine.stored.size, Difference()
    if not size.numel():
        return result
    itemsize = max(mine.stored.dtype.itemsize, theirs.stored.dtype.itemsize)
    most = max(max_memory // (2 * itemsize + WORKSPACE), 1)
    for offsets, sizes in Blocks.of(size, itemsize).parts(most):
        one = mine.archive.read_box(mine.stored, offsets, sizes)
        other = theirs.archive.read_box(theirs.stored, offsets, sizes)
        _compare_part(one, other, rtol, atol, offsets, result)
        on_read(one.nbytes)
    return result


def _compare_part(
    one: torch.Tensor, other: torch.Tensor, rtol: float, atol: float, offsets: list[int], result: Difference
) -> None:
    a, b = _comparable(one, other)
    scale = b.abs().to(torch.float64)
    finite = torch.isfinite(scale)
    scale = torch.where(finite, scale, 0.0)
    result.squares += float(scale.square().sum())
    if one.dtype == other.dtype and torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)):
        return
    both_nan = torch.isnan(a) & torch.isnan(b)
    apart = (a - b).abs().to(torch.float64)
    apart[both_nan | (a == b)] = 0  # inf - inf is nan
    if not (a.is_complex() or one.is_floating_point() or other.is_floating_point()):
        unequal = one.to(torch.int64) != other.to(torch.int64)
        apart[unequal & (apart == 0)] = 1  # large integers that are equal as floats
    apart[torch.isnan(apart)] = math.inf
    result.squares_apart += float(apart.square().sum())
    beyond = torch.where(finite, apart > atol + rtol * scale, apart > 0)
    count = int(beyond.sum())
    if not count:
        return
    result.elements += count
    apart = torch.where(beyond, apart, 0.0)
    largest = float(apart.max())
    if result.at is None or largest > result.largest:
        flat = int(apart.argmax())
        index = torch.unravel_index(torch.tensor(flat), tuple(apart.shape)) if apart.ndim else ()
        result.at = [int(k) + offset for k, offset in zip(index, offsets, strict=True)]
        result.largest = largest


def _comparable(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in a dtype that holds their difference."""
    if one.is_complex() or other.is_complex():
        return one.to(torch.complex128), other.to(torch.complex128)
    return one.to(torch.float64), other.to(torch.float64)
