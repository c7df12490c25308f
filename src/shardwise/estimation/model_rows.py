"""The modules of a model for a report: each with its parameters, and the boxes of each on ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from shardwise.layout.pictures.words import numbered
from shardwise.report import BoxOnRank, ModuleRow, ParameterRow
from shardwise.tensor import ShardedTensorBase

MOST_BOXES = 4096  # of a parameter: a page draws fewer


def module_rows(model: nn.Module) -> Iterator[ModuleRow]:
    """One row for each module, the model first."""
    for path, module in model.named_modules():
        named = ((name, one) for name, one in module._parameters.items() if one is not None)
        yield ModuleRow(path, type(module).__name__, [_row(name, one) for name, one in named])


def _row(name: str, parameter: Any) -> ParameterRow:
    shape, dtype = tuple(parameter.shape), str(parameter.dtype).removeprefix("torch.")
    size = parameter.numel() * parameter.element_size()
    if not isinstance(parameter, ShardedTensorBase):
        return ParameterRow(name, shape, dtype, size, (), "whole on every rank")
    layout = parameter._layout
    boxes = layout.at(range(min(len(layout), MOST_BOXES)))
    places = zip(layout.ranks.tolist(), boxes.offsets.tolist(), boxes.sizes.tolist(), strict=False)
    rows = [BoxOnRank(rank, tuple(offsets), tuple(sizes)) for rank, offsets, sizes in places]
    holders = len(set(layout.ranks.tolist()))
    return ParameterRow(
        name, shape, dtype, size, rows, f"{numbered(len(layout), 'box')} on {numbered(holders, 'rank')}"
    )
