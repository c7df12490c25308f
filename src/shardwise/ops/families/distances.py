"""Distances between rows, and bilinear forms: sums over a dim that may be cut."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import torch

from shardwise.ops.engine.call import Call
from shardwise.ops.engine.chunking import by_position, chunked, group_chunks, replicated
from shardwise.ops.engine.rule import Along, Labels, PartialReduction, Rule, broadcast_shapes
from shardwise.ops.engine.table import TABLE, add_rules, beyond_budget
from shardwise.ops.families.indexed_rows import model_of, read_rows
from shardwise.ops.families.reduction import constant_fill

aten = torch.ops.aten


def _power(base: torch.Tensor, exponent: float) -> torch.Tensor:
    """A power of numbers that are not negative; that of 0 is 0, and so is its gradient."""
    none = base == 0
    return torch.where(none, base, torch.where(none, torch.ones_like(base), base) ** exponent)


def _partial_distances(call: Call, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What some columns contribute: a sum of powers, or the largest."""
    found = aten._cdist_forward(*tensors, call["p"], call["compute_mode"])
    return (found if call["p"] in (0, 1, math.inf) else _power(found, call["p"]),)


def _combine_distances(call: Call, parts: list[torch.Tensor]) -> torch.Tensor:
    if call["p"] == math.inf:
        return parts[0].amax(0)
    total = parts[0].sum(0)
    return total if call["p"] in (0, 1) else _power(total, 1 / call["p"])


DISTANCES = PartialReduction(_combine_distances, constant_fill(0), _partial_distances)


def _cdist(call: Call) -> Rule:
    """Distances of all rows of one matrix from those of another, in batches; columns may be cut."""
    heads = [shape[:-2] for shape in call.shapes]
    batch = broadcast_shapes(*heads)
    labels = Labels()
    out = [labels.new(size) for size in batch]
    columns = labels.new(call.shapes[0][-1])
    operands: list[list[Along | None]] = []
    rows = []
    for shape, head in zip(call.shapes, heads, strict=True):
        skip = len(batch) - len(head)
        lead = [None if size == 1 and batch[skip + k] != 1 else out[skip + k] for k, size in enumerate(head)]
        rows.append(labels.new(shape[-2]))
        operands.append([*lead, rows[-1], columns])
    return labels.rule(operands, [[*out, *rows]], reduction=DISTANCES)


def _pdist(call: Call) -> Any:
    """Distances of each row from all behind it. Each rank computes those of its rows from the rows of one rank after
    another."""
    x, model = call["self"], model_of(call)
    if model is None or x.shape[0] < 2:
        return NotImplemented
    count = x.shape[0]
    rows = chunked(x, 0)
    sizes = [size for size in group_chunks(x.shape, 0, model).boxes.sizes[:, 0].tolist() if size]
    begins = accumulate(sizes, initial=0)
    blocks = [
        aten._cdist_forward(rows, replicated(rows.narrow(0, begin, size)), call["p"], None)
        for begin, size in zip(begins, sizes, strict=False)
    ]
    every = torch.cat(blocks, 1)
    return read_rows(
        every.reshape(-1), by_position(count * (count - 1) // 2, model, lambda at: places_of_pairs(at, count))
    )


def places_of_pairs(number: torch.Tensor, count: int) -> torch.Tensor:
    """In a flat square matrix, of pairs above the diagonal that are numbered row by row."""

    def begin(row: torch.Tensor) -> torch.Tensor:
        return row * (2 * count - row - 1) // 2

    # The root may be off by one for its rounding.
    row = ((2 * count - 1 - ((2 * count - 1) ** 2 - 8 * number).double().sqrt()) / 2).long().clamp(0, count - 2)
    row = torch.where(begin(row) > number, row - 1, row)
    row = torch.where(begin(row + 1) <= number, row + 1, row)
    return row * count + number - begin(row) + row + 1


def _bilinear(call: Call) -> Any:
    """One factor with the weight in one product, then with the other factor."""
    left, right, weight, bias = call["input1"], call["input2"], call["weight"], call["bias"]
    outputs, rows, columns = weight.shape
    halfway = torch.matmul(left, weight.permute(1, 0, 2).reshape(rows, outputs * columns))
    made = (halfway.reshape(*left.shape[:-1], outputs, columns) * right.unsqueeze(-2)).sum(-1)
    return made if bias is None else made + bias


add_rules({aten._cdist_forward: _cdist})
TABLE.update({aten._pdist_forward: beyond_budget(_pdist), aten.bilinear: beyond_budget(_bilinear)})
