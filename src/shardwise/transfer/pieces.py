"""Pieces of local tensors: as views, copied as fast as can be, and as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwise.layout import Layout
from shardwise.transfer.plan import Plan, cut


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a local tensor: as a view, and its number of elements."""

    view: torch.Tensor
    count: int


def pieces_of(
    plan: Plan,
    run: range,
    layout: Layout,
    rows: object,
    tensors: Sequence[torch.Tensor],
    most: int | None = None,
    rank: int | None = None,
) -> list[Piece]:
    """Views of the local tensors, or of another rank's, for a run of pieces, each of at most so many elements."""
    if not run:
        return []
    here = {row: k for k, row in enumerate(layout.rows_on(dist.get_rank() if rank is None else rank))}
    chosen = slice(run.start, run.stop)
    row_list = rows[chosen].tolist()  # type: ignore[index] # an array of rows
    offsets = (plan.boxes.offsets[chosen] - layout.boxes.offsets[row_list]).tolist()
    sizes = plan.boxes.sizes[chosen].tolist()
    pieces = []
    for row, offset, size in zip(row_list, offsets, sizes, strict=True):
        tensor = tensors[here[row]].detach()
        boxes = [(offset, size)] if most is None else cut((offset, size), most)
        for begin, extent in boxes:
            view = tensor[tuple(slice(o, o + s) for o, s in zip(begin, extent, strict=True))] if extent else tensor
            pieces.append(Piece(view, view.numel()))
    return pieces


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy one view into another. On a GPU in the widest units that both allow, which doubles the speed of slabs."""
    if source.is_cuda and target.is_cuda and source.dtype == target.dtype and is_as_it_lies(source, target):
        for unit in WIDE:
            if _comes_in(source, unit) and _comes_in(target, unit):
                source, target = source.view(unit), target.view(unit)
                break
    target.copy_(source)


WIDE = (torch.complex128, torch.float64)  # 16 and 8 bytes


def _comes_in(view: torch.Tensor, unit: torch.dtype) -> bool:
    """Whether each row of a view is whole units, and begins at one."""
    ratio = unit.itemsize // view.element_size()
    if ratio <= 1 or not view.dim() or view.stride(-1) != 1 or view.size(-1) % ratio:
        return False
    # Of a dim of one element too, though its stride is never walked: torch looks at it.
    return view.data_ptr() % unit.itemsize == 0 and all(stride % ratio == 0 for stride in view.stride()[:-1])


def is_as_it_lies(*tensors: torch.Tensor) -> bool:
    """Whether the values are those in memory: torch may have put off to conjugate or to negate them."""
    return not any(tensor.is_conj() or tensor.is_neg() for tensor in tensors)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, whatever its dtype."""
    assert is_as_it_lies(tensor), "its memory does not hold its values"
    # Of one element, any stride is contiguous; `view` wants 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
