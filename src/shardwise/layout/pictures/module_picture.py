"""The picture of a module: what each rank holds of it, and how each parameter lies."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from shardwise.errors import PropertyError
from shardwise.layout.pictures.layout_drawing import thumbnail
from shardwise.layout.pictures.picture import EDGE, GAP, WIDTH, Picture
from shardwise.layout.pictures.shares import ShareRow, row_text, shares_drawing
from shardwise.layout.pictures.subjects import Sharded
from shardwise.layout.pictures.svg import MARGIN, Canvas, shortened
from shardwise.layout.pictures.words import bytes_text, count_text, numbered, percent, ranks_text, size_text

if TYPE_CHECKING:
    from shardwise.layout.layout import Layout

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)")


@dataclass(frozen=True)
class TensorGroup:
    """One tensor of a module, or several whose names differ only in the numbers of layers."""

    name: str
    count: int
    size: torch.Size
    dtype: torch.dtype
    layout: Layout | None  # None for a plain tensor, whole on every rank

    @property
    def elements(self) -> int:
        """Elements of all tensors, each once."""
        return self.count * self.size.numel()

    @property
    def bytes(self) -> int:
        """Bytes of all tensors, each element once."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class RankBytes:
    """The bytes that one rank holds, of shards and of plain tensors."""

    rank: int
    sharded: int
    plain: int


def tensor_groups(module: nn.Module) -> list[TensorGroup]:
    """Parameters and buffers, in order; tied ones count once."""
    alike: dict[tuple[object, ...], list[tuple[str, torch.Tensor, Layout | None]]] = {}
    seen: set[int] = set()
    for name, tensor in _tensors(module):
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        layout = tensor._layout if isinstance(tensor, Sharded) else None
        if layout is None and hasattr(tensor, "device_mesh"):
            raise PropertyError(f"{name!r} is a {type(tensor).__name__}: convert it with from_dtensor to draw it")
        key = (NUMBER.sub("*", name), tensor.shape, tensor.dtype, layout)
        alike.setdefault(key, []).append((name, tensor, layout))
    found = []
    for (pattern, *_), members in alike.items():
        name, tensor, layout = members[0]
        found.append(
            TensorGroup(str(pattern) if len(members) > 1 else name, len(members), tensor.shape, tensor.dtype, layout)
        )
    return found


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():  # as in the old system: sharded tensors that are attributes
            if isinstance(value, torch.Tensor) and isinstance(value, Sharded):
                yield f"{path}.{name}" if path else name, value


def bytes_by_rank(entries: Sequence[TensorGroup]) -> list[RankBytes]:
    """The bytes on each rank that holds a shard; without shards, one entry of rank -1 stands for all ranks."""
    plain = sum(entry.bytes for entry in entries if entry.layout is None)
    sharded: dict[int, int] = {}
    for entry in entries:
        if entry.layout is None:
            continue
        ranks, number = np.unique(entry.layout.ranks, return_inverse=True)
        elements = np.zeros(len(ranks), dtype=np.int64)
        np.add.at(elements, number.reshape(-1), entry.layout.boxes.volumes)
        for rank, count in zip(ranks.tolist(), elements.tolist(), strict=True):
            sharded[rank] = sharded.get(rank, 0) + count * entry.count * entry.dtype.itemsize
    return [RankBytes(rank, sharded[rank], plain) for rank in sorted(sharded)] or [RankBytes(-1, 0, plain)]


def layout_phrase(layout: Layout | None) -> str:
    """A layout in few words: ``dim 0 in 4, 2 copies``."""
    if layout is None:
        return "plain, on every rank"
    boxes = layout.boxes.take(layout.boxes.filled)
    parts = []
    for dim in range(boxes.ndim):
        cuts = len(np.unique(np.concatenate([boxes.offsets[:, dim], boxes.ends[:, dim]]))) - 1
        if cuts > 1:
            parts.append(f"dim {dim} in {cuts}")
    copies = int(boxes.volumes.sum()) / max(layout.size.numel(), 1)
    if copies > 1:
        parts.append(f"{copies:g} copies" if copies == int(copies) else f"{copies:.1f} copies on average")
    ranks = len(set(layout.ranks.tolist()))
    return ", ".join(parts) or f"whole on {ranks} rank{'s' * (ranks != 1)}"


MOST_ENTRIES = 32
IN_COLUMN = 4  # entries below each other, at least
SMALL = 0.01  # of the module: plain tensors that are smaller share an entry
THUMB = (56.0, 38.0)
LEAST_TEXT = 120.0  # pixels for a name, however narrow the picture is


def module_picture(module: nn.Module, *, width: int = WIDTH) -> Picture:
    """The picture of a module. No communication."""
    entries = tensor_groups(module)
    return Picture(
        f"{type(module).__name__}: what each rank holds",
        [_summary(entries)],
        lambda: [_ranks(entries), *_columns(entries, width)],
        lambda columns, colours: _text(module, entries, columns),
        width,
    )


def _summary(entries: Sequence[TensorGroup]) -> str:
    sharded = [entry for entry in entries if entry.layout is not None]
    tensors, pieces = (sum(entry.count for entry in some) for some in (entries, sharded))
    size = bytes_text(_bytes(entries))
    count = count_text(sum(entry.elements for entry in entries))
    return f"{count} elements, {size}; {pieces} of {numbered(tensors, 'tensor')} sharded"


def _bytes(entries: Sequence[TensorGroup]) -> int:
    return sum(entry.bytes for entry in entries)


def _shown(entries: Sequence[TensorGroup]) -> tuple[list[TensorGroup], list[TensorGroup], list[TensorGroup]]:
    """Entries to show one by one, small plain ones that share one, and what is left out."""
    least = SMALL * _bytes(entries)
    small = [entry for entry in entries if entry.layout is None and entry.bytes < least]
    if len(small) < 2:
        small = []
    alone = [entry for entry in entries if entry not in small]
    return alone[:MOST_ENTRIES], small, alone[MOST_ENTRIES:]


# Rank by rank ---------------------------------------------------------------------------------------------------------


def _equal(entries: Sequence[TensorGroup]) -> list[tuple[str, RankBytes, list[int]]]:
    """Ranks that hold equally much: their name, what each holds, and which they are."""
    alike: dict[tuple[int, int], tuple[RankBytes, list[int]]] = {}
    for held in bytes_by_rank(entries):
        alike.setdefault((held.sharded, held.plain), (held, []))[1].append(held.rank)
    return [("every rank" if held.rank < 0 else ranks_text(ranks), held, ranks) for held, ranks in alike.values()]


def _ranks(entries: Sequence[TensorGroup]) -> Canvas:
    groups, rows, whole = _equal(entries), [], max(_bytes(entries), 1)
    for name, held, ranks in groups:
        total = held.sharded + held.plain
        tooltip = f"{name}: {bytes_text(held.sharded)} of shards, {bytes_text(held.plain)} of plain tensors"
        words = row_text(bytes_text(total), total / whole, len(ranks))
        known = [rank for rank in ranks if rank >= 0]
        rows.append(ShareRow(name, known, words, held.sharded / whole, held.plain / whole, tooltip))
    notes = ["grey: plain tensors, whole on every rank"] if any(held.plain for _, held, _ in groups) else []
    return shares_drawing(rows, notes, fills_row=True)


# Tensor by tensor -----------------------------------------------------------------------------------------------------


def _columns(entries: Sequence[TensorGroup], width: int) -> list[Canvas]:
    alone, small, rest = _shown(entries)
    lines: list[TensorGroup | list[TensorGroup]] = [*alone, *([small] if small else [])]
    height = max(IN_COLUMN, (len(lines) + 1) // 2)
    begins = range(0, len(lines), height)
    room = (width - 2 * EDGE - MARGIN - GAP * (len(begins) - 1)) / max(len(begins), 1) - MARGIN  # pixels of a column
    columns = [_column(lines[at : at + height], room) for at in begins]
    if rest:
        last = columns[-1]
        more = f"… and {numbered(sum(entry.count for entry in rest), 'more tensor')}, {bytes_text(_bytes(rest))}"
        last.text(2, last.bottom + 16, more, css="soft")
    return columns


def _column(lines: Sequence[TensorGroup | list[TensorGroup]], room: float) -> Canvas:
    canvas, (width, height) = Canvas(), THUMB
    text = max(room - width - 12, LEAST_TEXT)
    for number, line in enumerate(lines):
        y = number * (height + 14)
        words = (
            _small_words(line)
            if isinstance(line, list)
            else (line.name, _tensor_text(line), layout_phrase(line.layout))
        )
        names = ", ".join(entry.name for entry in line) if isinstance(line, list) else words[0]
        with canvas.mark(f"{names}: {words[1]}, {words[2]}", "tensor"):
            if isinstance(line, list) or line.layout is None:
                canvas.rect(2, y + 2, width, height, css="plain")
            else:
                thumbnail(canvas, line.layout, (2, y + 2, width, height))
            canvas.text(width + 12, y + 13, shortened(words[0], text), css="bold")
            canvas.text(width + 12, y + 27, shortened(words[1], text, 10.5), size=10.5, css="soft")
            canvas.text(width + 12, y + 40, shortened(words[2], text, 10.5), size=10.5, css="soft")
    return canvas


def _small_words(entries: Sequence[TensorGroup]) -> tuple[str, str, str]:
    count = sum(entry.count for entry in entries)
    return f"{numbered(count, 'small tensor')}", f"{bytes_text(_bytes(entries))} in all", layout_phrase(None)


def _tensor_text(entry: TensorGroup) -> str:
    times = f"{entry.count} tensors of " if entry.count > 1 else ""
    return f"{times}{size_text(entry.size)} {str(entry.dtype).removeprefix('torch.')}, {bytes_text(entry.bytes)}"


# In the terminal ------------------------------------------------------------------------------------------------------


def _text(module: nn.Module, entries: Sequence[TensorGroup], width: int) -> str:
    lines, whole = [f"{type(module).__name__}: {_summary(entries)}"], max(_bytes(entries), 1)
    for name, held, ranks in _equal(entries):
        total, each = held.sharded + held.plain, " each" if len(ranks) > 1 else ""
        parts = f"{bytes_text(held.sharded)} of shards, {bytes_text(held.plain)} plain"
        lines.append(f"  {name}: {bytes_text(total)}{each}, {percent(total / whole)} ({parts})")
    alone, small, rest = _shown(entries)
    broad = min(max((len(entry.name) for entry in alone), default=0), width // 2)
    for entry in alone:
        name = entry.name if len(entry.name) <= broad else f"…{entry.name[1 - broad :]}"
        lines.append(f"  {name:<{broad}}  {_tensor_text(entry)}, {layout_phrase(entry.layout)}")
    if small:
        lines.append("  " + ", ".join(_small_words(small)))
    if rest:
        lines.append(
            f"  … and {numbered(sum(entry.count for entry in rest), 'more tensor')}, {bytes_text(_bytes(rest))}"
        )
    return "\n".join(lines)
