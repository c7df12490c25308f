"""The picture of a module: what each rank holds of it, and how each parameter lies."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise.viz.holdings_drawing import Row, holdings_drawing, row_words
from shardwise.viz.layout_drawing import thumbnail
from shardwise.viz.model import Entry, Held, entries_of, held_by_rank, how_text
from shardwise.viz.picture import WIDTH, Picture
from shardwise.viz.svg import Canvas, shortened
from shardwise.viz.words import bytes_text, count_text, numbered, percent, ranks_text, size_text

MOST_ENTRIES = 32
IN_COLUMN = 4  # entries below each other, at least
SMALL = 0.01  # of the module: plain tensors that are smaller share an entry
THUMB = (56.0, 38.0)
TEXT = 252.0


def module_picture(module: nn.Module, *, width: int = WIDTH) -> Picture:
    """The picture of a module. No communication."""
    entries = entries_of(module)
    return Picture(
        f"{type(module).__name__}: what each rank holds",
        [_summary(entries)],
        lambda: [_ranks(entries), *_columns(entries)],
        lambda columns, colours: _text(module, entries, columns),
        width,
    )


def _summary(entries: Sequence[Entry]) -> str:
    sharded = [entry for entry in entries if entry.layout is not None]
    tensors, pieces = (sum(entry.count for entry in some) for some in (entries, sharded))
    told = bytes_text(_bytes(entries))
    count = count_text(sum(entry.elements for entry in entries))
    return f"{count} elements, {told}; {pieces} of {numbered(tensors, 'tensor')} sharded"


def _bytes(entries: Sequence[Entry]) -> int:
    return sum(entry.bytes for entry in entries)


def _shown(entries: Sequence[Entry]) -> tuple[list[Entry], list[Entry], list[Entry]]:
    """Entries to show one by one, small plain ones that share one, and what is left out."""
    least = SMALL * _bytes(entries)
    small = [entry for entry in entries if entry.layout is None and entry.bytes < least]
    if len(small) < 2:
        small = []
    alone = [entry for entry in entries if entry not in small]
    return alone[:MOST_ENTRIES], small, alone[MOST_ENTRIES:]


# Rank by rank ---------------------------------------------------------------------------------------------------------


def _equal(entries: Sequence[Entry]) -> list[tuple[str, Held, list[int]]]:
    """Ranks that hold equally much: their name, what each holds, and which they are."""
    alike: dict[tuple[int, int], tuple[Held, list[int]]] = {}
    for held in held_by_rank(entries):
        alike.setdefault((held.sharded, held.plain), (held, []))[1].append(held.rank)
    return [("every rank" if held.rank < 0 else ranks_text(ranks), held, ranks) for held, ranks in alike.values()]


def _ranks(entries: Sequence[Entry]) -> Canvas:
    groups, rows, whole = _equal(entries), [], max(_bytes(entries), 1)
    for name, held, ranks in groups:
        total = held.sharded + held.plain
        told = f"{name}: {bytes_text(held.sharded)} of shards, {bytes_text(held.plain)} of plain tensors"
        words = row_words(bytes_text(total), total / whole, len(ranks))
        known = [rank for rank in ranks if rank >= 0]
        rows.append(Row(name, known, words, held.sharded / whole, held.plain / whole, told))
    notes = ["grey: plain tensors, whole on every rank"] if any(held.plain for _, held, _ in groups) else []
    return holdings_drawing(rows, notes, fills_row=True)


# Tensor by tensor -----------------------------------------------------------------------------------------------------


def _columns(entries: Sequence[Entry]) -> list[Canvas]:
    alone, small, rest = _shown(entries)
    lines: list[Entry | list[Entry]] = [*alone, *([small] if small else [])]
    height = max(IN_COLUMN, (len(lines) + 1) // 2)
    columns = [_column(lines[at : at + height]) for at in range(0, len(lines), height)]
    if rest:
        last = columns[-1]
        told = f"… and {numbered(sum(entry.count for entry in rest), 'more tensor')}, {bytes_text(_bytes(rest))}"
        last.text(2, last.bottom + 16, told, css="soft")
    return columns


def _column(lines: Sequence[Entry | list[Entry]]) -> Canvas:
    canvas, (width, height) = Canvas(), THUMB
    for number, line in enumerate(lines):
        y = number * (height + 14)
        words = _small_words(line) if isinstance(line, list) else (line.name, _told(line), how_text(line.layout))
        names = ", ".join(entry.name for entry in line) if isinstance(line, list) else words[0]
        with canvas.mark(f"{names}: {words[1]}, {words[2]}", "tensor"):
            if isinstance(line, list) or line.layout is None:
                canvas.rect(2, y + 2, width, height, css="plain")
            else:
                thumbnail(canvas, line.layout, (2, y + 2, width, height))
            canvas.text(width + 12, y + 13, shortened(words[0], TEXT), css="bold")
            canvas.text(width + 12, y + 27, shortened(words[1], TEXT, 10.5), size=10.5, css="soft")
            canvas.text(width + 12, y + 40, shortened(words[2], TEXT, 10.5), size=10.5, css="soft")
    return canvas


def _small_words(entries: Sequence[Entry]) -> tuple[str, str, str]:
    count = sum(entry.count for entry in entries)
    return f"{numbered(count, 'small tensor')}", f"{bytes_text(_bytes(entries))} in all", how_text(None)


def _told(entry: Entry) -> str:
    times = f"{entry.count} tensors of " if entry.count > 1 else ""
    return f"{times}{size_text(entry.size)} {str(entry.dtype).removeprefix('torch.')}, {bytes_text(entry.bytes)}"


# In the terminal ------------------------------------------------------------------------------------------------------


def _text(module: nn.Module, entries: Sequence[Entry], width: int) -> str:
    lines, whole = [f"{type(module).__name__}: {_summary(entries)}"], max(_bytes(entries), 1)
    for name, held, ranks in _equal(entries):
        total, each = held.sharded + held.plain, " each" if len(ranks) > 1 else ""
        parts = f"{bytes_text(held.sharded)} of shards, {bytes_text(held.plain)} plain"
        lines.append(f"  {name}: {bytes_text(total)}{each}, {percent(total / whole)} ({parts})")
    alone, small, rest = _shown(entries)
    broad = min(max((len(entry.name) for entry in alone), default=0), width // 2)
    for entry in alone:
        name = entry.name if len(entry.name) <= broad else f"…{entry.name[1 - broad :]}"
        lines.append(f"  {name:<{broad}}  {_told(entry)}, {how_text(entry.layout)}")
    if small:
        lines.append("  " + ", ".join(_small_words(small)))
    if rest:
        lines.append(
            f"  … and {numbered(sum(entry.count for entry in rest), 'more tensor')}, {bytes_text(_bytes(rest))}"
        )
    return "\n".join(lines)
