"""One kernel that copies many views at once.

A view is rows, each of which is a run of elements that lie side by side, at both ends if possible. Rows are numbered by
up to three dims. The kernel copies tiles: some elements of some rows of a view. A table says of each view where it
lies, another of each tile to which view it belongs and where it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd, prod
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

Pair = tuple[torch.Tensor, torch.Tensor]  # target and source

TILE, WARPS = 512, 2  # elements, and what copies them: small ones, of which a GPU has many under way, are fastest
TILE_APART, WARPS_APART = 2048, 4  # where elements lie apart: it gains by what many rows have in common
WIDTHS = (16, 64)  # elements of each row in a tile; long rows fill one. Each is a kernel of its own, so there are few
WIDEST = 16  # bytes that a thread can move at once
LARGEST = 2**30  # rows, and elements of one
ROW_DIMS = 3
FIELDS = 6 + 2 * ROW_DIMS + 2  # both addresses, rows, run, the inner sizes of rows, strides of rows, strides of runs

# A whole view is copied in units, whatever its dtype; only one that is converted goes element by element.
UNITS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
FLOATS = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


class _Kind(NamedTuple):
    """What a kernel is compiled for."""

    source: Any
    target: Any
    width: int  # elements of each row in a tile
    aligned: int  # bytes that both ends, and all rows there, begin at multiples of
    together: int  # elements of a run that are as many bytes, or fewer
    apart: bool  # whether the elements of a run lie apart at one end

    @property
    def tile(self) -> int:
        """Elements of one."""
        return TILE_APART if self.apart else TILE


class _View(NamedTuple):
    """A pair as the kernel sees it."""

    kind: _Kind
    fields: list[int]
    rows: int
    run: int


def launches(device: torch.device, pairs: Sequence[Pair]) -> tuple[list[Callable[[], object]], list[Pair]]:
    """Functions that copy these pairs between them, in the current stream, and the pairs that they do not copy."""
    kinds: dict[_Kind, list[_View]] = {}
    left: list[Pair] = []
    for pair in pairs:
        if not pair[0].numel():
            continue
        view = _seen(*pair)
        if view is None:
            left.append(pair)
        else:
            kinds.setdefault(view.kind, []).append(view)
    held = [tensor for pair in pairs for tensor in pair]  # the tables have their addresses
    return [_launch(device, kind, views, held) for kind, views in kinds.items()], left


def _launch(device: torch.device, kind: _Kind, views: Sequence[_View], held: object) -> Callable[[], object]:
    tiles = _tiles(views, kind)
    places = torch.tensor([view.fields for view in views], dtype=torch.int64).to(device)
    table = torch.from_numpy(tiles).to(device)

    def launch(count: int = len(tiles), held: object = held) -> None:
        with torch.cuda.device(device):
            _copy_tiles[(count,)](
                places,
                table,
                SOURCE=kind.source,
                TARGET=kind.target,
                ROWS=kind.tile // kind.width,
                WIDTH=kind.width,
                ALIGNED=kind.aligned,
                TOGETHER=kind.together,
                APART=kind.apart,
                FIELDS=FIELDS,
                num_warps=WARPS_APART if kind.apart else WARPS,
            )

    launch(0)  # it is loaded now: CUDA would wait for all that is under way, be it for a rank that is gone
    return launch


def _tiles(views: Sequence[_View], kind: _Kind) -> Any:
    """Of each tile the number of its view, its first row and its first element there."""
    width, high = kind.width, kind.tile // kind.width
    down = np.array([-(-view.rows // high) for view in views], dtype=np.int64)
    across = np.array([-(-view.run // width) for view in views], dtype=np.int64)
    counts = down * across
    number = np.repeat(np.arange(len(views)), counts)
    within = np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts, counts)
    found = np.stack([number, within // across[number] * high, within % across[number] * width], axis=1)
    return found.astype(np.int32)


def _seen(target: torch.Tensor, source: torch.Tensor) -> _View | None:
    """A pair as rows of runs; None where it has too many dims, or a dtype that the kernel does not convert."""
    same = target.dtype == source.dtype
    if not same and (target.dtype not in FLOATS or source.dtype not in FLOATS):
        return None
    sizes, into, out = _joined(target, source)
    apart = bool(sizes) and (into[-1] != 1 or out[-1] != 1)
    run, steps = (sizes.pop(), (into.pop(), out.pop())) if sizes else (1, (1, 1))
    if len(sizes) > ROW_DIMS:
        return None
    rows, wider = prod(sizes), max(target.element_size(), source.element_size())
    aligned = gcd(WIDEST, target.data_ptr(), source.data_ptr())
    aligned = gcd(aligned, *(target.element_size() * step for step in into))
    aligned = gcd(aligned, *(source.element_size() * step for step in out))
    if same:
        unit = wider if apart else gcd(8, aligned, run * wider)
        if unit not in UNITS:
            return None
        if not apart:
            run, into, out = (run * wider // unit, *([step * wider // unit for step in each] for each in (into, out)))
        types, wider = (UNITS[unit], UNITS[unit]), unit
    else:
        types = FLOATS[source.dtype], FLOATS[target.dtype]
    if max(rows, run) > LARGEST:
        return None
    together = 1 if apart else gcd(max(aligned // wider, 1), run)
    width = WIDTHS[0] if run <= WIDTHS[0] else WIDTHS[1] if run < TILE else TILE
    lacking = ROW_DIMS - len(sizes)
    fields = [source.data_ptr(), target.data_ptr(), rows, run, *([1] * lacking + sizes)[1:]]
    for strides in (out, into):
        fields += [0] * lacking + strides
    return _View(_Kind(*types, width, aligned, together, apart), [*fields, *steps[::-1]], rows, run)


def _joined(target: torch.Tensor, source: torch.Tensor) -> tuple[list[int], list[int], list[int]]:
    """Sizes and both strides, with dims that lie behind one another at both ends made one."""
    sizes: list[int] = []
    into: list[int] = []
    out: list[int] = []
    dims = zip(target.shape, target.stride(), source.stride(), strict=True)
    for size, one, other in sorted(dims, key=lambda dim: dim[1], reverse=True):  # as the target lies
        if size == 1:
            continue
        if sizes and into[-1] == one * size and out[-1] == other * size:
            sizes[-1], into[-1], out[-1] = sizes[-1] * size, one, other
        else:
            sizes.append(size)
            into.append(one)
            out.append(other)
    return sizes, into, out


@triton.jit  # type: ignore[untyped-decorator]
def _copy_tiles(  # type: ignore[no-untyped-def] # Triton's language
    places,
    tiles,
    SOURCE: tl.constexpr,  # noqa: N803 # constants of the kernel
    TARGET: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    ALIGNED: tl.constexpr,  # noqa: N803
    TOGETHER: tl.constexpr,  # noqa: N803
    APART: tl.constexpr,  # noqa: N803
    FIELDS: tl.constexpr,  # noqa: N803
):
    tile = tiles + 3 * tl.program_id(0).to(tl.int64)
    place = places + FIELDS * tl.load(tile).to(tl.int64)
    source = tl.load(place).to(tl.pointer_type(SOURCE))
    target = tl.load(place + 1).to(tl.pointer_type(TARGET))
    rows, run = tl.load(place + 2), tl.multiple_of(tl.load(place + 3), TOGETHER)
    middle, last = tl.load(place + 4).to(tl.int32), tl.load(place + 5).to(tl.int32)
    row = tl.load(tile + 1) + tl.arange(0, ROWS)
    at = tl.multiple_of(tl.load(tile + 2), TOGETHER) + tl.arange(0, WIDTH)
    third, rest = row % last, row // last
    first, second = rest // middle, rest % middle
    begin = first * tl.load(place + 6) + second * tl.load(place + 7) + third * tl.load(place + 8)
    end = first * tl.load(place + 9) + second * tl.load(place + 10) + third * tl.load(place + 11)
    inside = (row < rows)[:, None] & (at < run)[None, :]
    if APART:
        from_where = begin[:, None] + (at * tl.load(place + 12))[None, :]
        where_to = end[:, None] + (at * tl.load(place + 13))[None, :]
    else:
        from_where = tl.multiple_of(begin, TOGETHER)[:, None] + at[None, :]
        where_to = tl.multiple_of(end, TOGETHER)[:, None] + at[None, :]
        source, target = tl.multiple_of(source, ALIGNED), tl.multiple_of(target, ALIGNED)
    values = tl.load(source + from_where, mask=inside)
    tl.store(target + where_to, values.to(TARGET), mask=inside)
