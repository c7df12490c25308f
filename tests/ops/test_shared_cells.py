"""Products of operands on a mesh: a row of ranks has samples of its own, each of its ranks a part of the weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from shardwise import ShardedTensor
from shardwise.layout import Layout, Places
from shardwise.layout.geometry import Boxes
from shardwise.layout.specs import FixedShardingSpec
from shardwise.ops.engine.rule import Along, PartialReduction, Rule
from shardwise.ops.engine.schedule import Operand, make_reduction_plan, make_schedule
from shardwise.tensor import shard_tensor
from shardwise.testing import run_on_ranks

SUM = PartialReduction(lambda call, stacks: stacks[0].sum(0), lambda dtype: (0,), is_sum=True)
LARGE = 1 << 40
EVERYONE = Places.on_ranks(np.arange(6), "cpu")


def product(rows: int, inner: int, columns: int) -> Rule:
    """``ik, kj -> ij``."""
    i, k, j = (Along(label) for label in range(3))
    return Rule((rows, inner, columns), ((i, k), (k, j)), ((i, j),), reduction=SUM)


def on_mesh(size: tuple[int, int], starts: list[tuple[int, int]], sizes: list[tuple[int, int]]) -> Layout:
    """A box for each of six ranks."""
    return Layout.of(size, Boxes(np.array(starts), np.array(sizes)), EVERYONE)


SAMPLES = on_mesh((500, 600), [(0, 0)] * 3 + [(300, 0)] * 3, [(300, 600)] * 3 + [(200, 600)] * 3)
COLUMNS = on_mesh((600, 900), [(0, 300 * k) for k in (0, 1, 2)] * 2, [(600, 300)] * 6)
HIDDEN = on_mesh(
    (500, 900), [(300 * row, 300 * k) for row in (0, 1) for k in (0, 1, 2)], [(300, 300)] * 3 + [(200, 300)] * 3
)
INNER = on_mesh((900, 600), [(300 * k, 0) for k in (0, 1, 2)] * 2, [(300, 600)] * 6)


def test_operands_on_a_mesh_stay_where_they_are() -> None:
    """Each rank multiplies the samples of its row by its own columns, and nobody repeats what another one computes."""
    schedule = make_schedule(product(500, 600, 900), (Operand(SAMPLES, 4), Operand(COLUMNS, 4)), EVERYONE, LARGE)
    assert schedule is not None
    assert (schedule.moved, schedule.in_place, schedule.results[0]) == (0, (True, True), HIDDEN)


def test_sums_stay_within_their_row() -> None:
    """Partial sums of a row of ranks are added up there: no rank sends to another row."""
    schedule = make_schedule(product(500, 900, 600), (Operand(HIDDEN, 4), Operand(INNER, 4)), EVERYONE, LARGE)
    assert schedule is not None
    assert (schedule.moved, schedule.partial) == (0, True)
    result = make_reduction_plan(schedule, EVERYONE).result
    assert result.boxes.offsets[:, 0].tolist() == [0, 100, 200, 300, 300, 300]
    assert result.boxes.volumes.sum() == 500 * 600
    assert (result.boxes.ends[:3, 0] <= 300).all()


@pytest.mark.parametrize("wide", [1 << 10, 1 << 20])
def test_no_product_is_computed_twice(wide: int) -> None:
    """Samples that lie on all ranks come to the rows of ranks that share the weights, or weights come to them."""
    scattered = on_mesh((600, 600), [(100 * rank, 0) for rank in range(6)], [(100, 600)] * 6)
    rule = Rule((600, 600, wide), product(1, 1, 1).operands, product(1, 1, 1).results, reduction=SUM)
    third = -(-wide // 3)
    sizes = [(600, min(third, wide - third * k)) for k in (0, 1, 2)] * 2
    weight = on_mesh((600, wide), [(0, third * k) for k in (0, 1, 2)] * 2, sizes)
    schedule = make_schedule(rule, (Operand(scattered, 4, is_activation=True), Operand(weight, 4)), EVERYONE, LARGE)
    assert schedule is not None
    assert schedule.cells.boxes.volumes.sum() == 600 * 600 * wide


def two_layers() -> None:
    """On uneven rows of two ranks, gradients are those of the plain layers."""
    torch.manual_seed(0)
    plain = torch.randn(7, 4, 6, dtype=torch.float64)
    up, down = torch.randn(5, 6, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)

    def cut(tensor: torch.Tensor, *boxes: tuple[list[int], list[int]]) -> ShardedTensor:
        starts, sizes = (np.array(one) for one in zip(*boxes, strict=True))
        layout = Layout.of(tensor.shape, Boxes(starts, sizes), Places.on_ranks(np.arange(4), "cpu"))
        found: ShardedTensor = shard_tensor(tensor, FixedShardingSpec.of(layout)).requires_grad_()
        return found

    samples = [([0, 0, 0], [5, 4, 6])] * 2 + [([5, 0, 0], [2, 4, 6])] * 2
    x = cut(plain, *samples)
    first = cut(up, *[([0, 0], [3, 6]), ([3, 0], [2, 6])] * 2)
    second = cut(down, *[([0, 0], [6, 3]), ([0, 3], [6, 2])] * 2)
    expected = [one.clone().requires_grad_() for one in (plain, up, down)]
    for _ in range(2):
        hidden = functional.linear(functional.gelu(functional.linear(x, first)), second) + x
        again = functional.linear(functional.gelu(functional.linear(hidden, first)), second)
        again.square().sum().backward()
    want = functional.linear(functional.gelu(functional.linear(expected[0], expected[1])), expected[2]) + expected[0]
    want = functional.linear(functional.gelu(functional.linear(want, expected[1])), expected[2])
    want.square().sum().backward()
    torch.testing.assert_close(again.full_tensor(), want)
    for found, plain_one in zip((x, first, second), expected, strict=True):
        torch.testing.assert_close(found.grad.full_tensor(), 2 * plain_one.grad)


def test_layers_on_a_mesh_have_the_gradients_of_plain_ones() -> None:
    """Two rows of two ranks."""
    run_on_ranks(4, two_layers)
