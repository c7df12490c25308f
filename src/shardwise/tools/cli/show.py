"""``shardwise inspect``: shows what is in a checkpoint, and in which files."""

from __future__ import annotations

import argparse
from typing import Any

from shardwise.checkpoint.archive import Archive, StoredTensor, open_archive
from shardwise.checkpoint.archive.stored import FileLocation, dtype_name
from shardwise.errors import FileGoneError
from shardwise.layout.geometry import describe
from shardwise.layout.pictures import picture_of
from shardwise.layout.pictures.words import bytes_text, numbered, size_text
from shardwise.tools.cli.console import Column, Console, names, numbers
from shardwise.tools.cli.contents import (
    Contents,
    UsageError,
    bytes_by_file,
    layout_summary,
    tensors_text,
)
from shardwise.tools.cli.near_names import unknown_name

MOST_BOXES = 64  # listed for one tensor
LONGEST_VALUE = 60  # characters


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command."""
    with open_archive(options.path) as archive:
        contents = Contents.of(archive)
        if options.tensor is not None:
            _show_tensor(archive, contents, options.tensor, console)
        else:
            return _show_all(archive, options.path, contents.selected(options.only), options.layouts, console)
    return 0


def _broken_files(archive: Archive) -> dict[str, str]:
    """The files that are missing or of another size than was written, in words. Others' formats have no such record."""
    broken = {}
    for name, size in archive.index.files.items() if archive.index.sums is not None else ():
        try:
            file = archive.storage.open(name)
        except FileGoneError:
            broken[name] = "missing"
            continue
        if file.size < size:
            broken[name] = f"cut off: {file.size:,} of {size:,} bytes are there"
        elif file.size > size:
            broken[name] = f"changed: {file.size:,} bytes are there, and {size:,} were written"
        file.close()
    return broken


def _show_all(archive: Archive, path: str, contents: Contents, layouts: bool, console: Console) -> int:
    index, stored = archive.index, {name: held.stored for name, held in contents.by_name.items()}
    held, counts = bytes_by_file(index, contents.distinct)
    broken = _broken_files(archive)
    console.give(
        {
            "path": path,
            "format": index.format,
            "id": index.id,
            "nbytes": contents.nbytes,
            "distinct_tensors": len(contents.distinct),
            "files": {
                name: {
                    "nbytes": size,
                    "tensors": counts[k],
                    "tensor_nbytes": held[k],
                    "damage": broken.get(name),
                }
                for k, (name, size) in enumerate(index.files.items())
            },
            "tensors": {
                name: {
                    "dtype": dtype_name(tensor.dtype),
                    "size": list(tensor.size),
                    "nbytes": tensor.nbytes,
                    "layout": layout_summary(tensor.layout),
                    "files": list(index.files_of(tensor)),
                }
                for name, tensor in stored.items()
            },
            "values": contents.values_by_name,
        }
    )
    facts = [("checkpoint", path), ("format", index.format)]
    facts += [("id", index.id)] if index.id else []
    count = tensors_text(len(contents.distinct), len(stored))
    facts += [("tensors", f"{count}, {bytes_text(contents.nbytes)}")]
    wrong = f"; {len(broken)} damaged" if broken else ""
    facts += [("files", f"{numbered(len(index.files), 'file')}, {bytes_text(sum(index.files.values()))}{wrong}")]
    console.facts(facts)
    if index.files:
        console.line()
        largest, longest = max(held) or 1, 12 if console.width > 100 else 6
        rows = [
            [
                name,
                bytes_text(size),
                str(counts[k]),
                bytes_text(held[k]),
                broken.get(name) or _bar(held[k] / largest, longest),
            ]
            for k, (name, size) in enumerate(index.files.items())
        ]
        console.table([names("file"), numbers("bytes"), numbers("tensors"), numbers("of them"), names("")], rows)
    if stored:
        console.line()
        columns = [names(), Column("dtype"), Column("size"), numbers("bytes"), Column("in files"), numbers("per box")]
        rows = [_row(name, tensor) for name, tensor in stored.items()]
        cut = len(columns) if any(row[-1] for row in rows) and console.width > 100 else len(columns) - 1
        console.table(columns[:cut], [row[:cut] for row in rows])
    if contents.values:
        console.line()
        rows = [[name, _value_text(value)] for name, value in contents.values_by_name.items()]
        console.table([names("value"), Column("", wide=True)], rows)
    if layouts:
        for name, tensor in stored.items():
            console.line()
            console.line(name, "bold")
            console.line(picture_of(tensor.layout, dtype=tensor.dtype).text(width=min(console.width - 8, 72)))
    return int(bool(broken))


def _row(name: str, tensor: StoredTensor) -> list[str]:
    smallest, largest = (volume * tensor.dtype.itemsize for volume in tensor.layout.volumes)
    each = (
        "" if largest == tensor.nbytes else bytes_text(largest) if smallest == largest else f"≤ {bytes_text(largest)}"
    )
    size = size_text(tensor.size, "×")
    return [name, dtype_name(tensor.dtype), size, bytes_text(tensor.nbytes), layout_summary(tensor.layout), each]


def _show_tensor(archive: Archive, contents: Contents, name: str, console: Console) -> None:
    if name not in contents.by_name:
        raise UsageError(f"'{archive.storage}' has no tensor '{name}'; {unknown_name(name, contents.by_name)}")
    tensor = contents.by_name[name].stored
    boxes, found = tensor.layout.boxes, []
    rows: list[int] = tensor.layout.pattern.filled.tolist()
    for row in rows[:MOST_BOXES]:
        location = archive.locate(tensor, row)
        where = (location.file, location.begin) if isinstance(location, FileLocation) else ("the index", 0)
        offsets, sizes = boxes.offsets[row].tolist(), boxes.sizes[row].tolist()
        nbytes = int(boxes.volumes[row]) * tensor.dtype.itemsize
        found.append({"offsets": offsets, "sizes": sizes, "file": where[0], "begin": where[1], "nbytes": nbytes})
    tied = [other for other, held in contents.by_name.items() if held.stored is tensor and other != name]
    console.give(
        {
            "name": name,
            "dtype": dtype_name(tensor.dtype),
            "size": list(tensor.size),
            "nbytes": tensor.nbytes,
            "layout": layout_summary(tensor.layout),
            "tied": tied,
            "boxes": found,
            "boxes_left_out": len(rows) - len(found),
        }
    )
    facts = [("tensor", name), ("dtype", dtype_name(tensor.dtype)), ("size", size_text(tensor.size))]
    facts += [
        ("bytes", f"{bytes_text(tensor.nbytes)} ({tensor.nbytes:,})"),
        ("in files", layout_summary(tensor.layout)),
    ]
    facts += [("also called", ", ".join(tied))] if tied else []
    console.facts(facts)
    console.line()
    console.line(picture_of(tensor.layout, dtype=tensor.dtype).text(width=min(console.width - 8, 72)))
    console.line()
    cells = [
        [describe(box["offsets"], box["sizes"]), bytes_text(box["nbytes"]), box["file"], f"{box['begin']:,}"]
        for box in found
    ]
    console.table([Column("box"), numbers("bytes"), names("file"), numbers("at byte")], cells)
    if len(rows) > len(found):
        console.line(f"… and {len(rows) - len(found):,} more")


def _bar(part: float, longest: int) -> str:
    return "█" * max(round(part * longest), 1) if part else ""


def _value_text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"
