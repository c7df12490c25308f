"""The closures of functions."""

from __future__ import annotations

import types


def is_filled(cell: types.CellType) -> bool:
    """Whether a cell has a value."""
    try:
        cell.cell_contents  # noqa: B018 # raises if the cell is empty
    except ValueError:
        return False
    return True


def closure_of(function: types.FunctionType) -> list[tuple[str, types.CellType]]:
    """The names and cells of a closure, of those that have values."""
    pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return [(name, cell) for name, cell in pairs if is_filled(cell)]
