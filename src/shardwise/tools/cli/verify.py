"""``shardwise verify``: checks every byte of a checkpoint against its checksums."""

from __future__ import annotations

import argparse
from typing import Any

from shardwise.checkpoint import verify
from shardwise.checkpoint.archive import find_checkpoint, open_archive
from shardwise.errors import CheckpointError, DamageError
from shardwise.layout.pictures.words import bytes_text, numbered
from shardwise.tools.cli.console import Console


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command."""
    answer: dict[str, Any] = {"path": options.path, "format": find_checkpoint(options.path)[-1].value}
    try:
        with open_archive(options.path) as archive:
            index = archive.index
        total = sum(stored.nbytes for stored in index.tensors.values())
        answer |= {"tensors": len(index.tensors), "files": len(index.files), "nbytes": total}
        with console.progress("verifying", total) as on_read:
            verified = verify(options.path, on_read=on_read)
    except CheckpointError as error:
        damage = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
        console.give({**answer, "whole": False, "damage": damage})
        what = "is damaged" if isinstance(error, DamageError) else "cannot be read"
        console.line(f"{options.path} {what}:", "red")
        for line in damage:
            console.line(f"  {line}")
        return 1
    console.give({**answer, "whole": True, "damage": [], "checksums": verified.checksums})
    summary = (
        f"{numbered(verified.tensors, 'tensor')}, {bytes_text(verified.bytes)} in {numbered(verified.files, 'file')}"
    )
    if verified.checksums:
        console.line(f"whole: {summary}", "green")
    else:
        console.line(f"readable: {summary}; {verified.format} has no checksums, so bytes may have changed", "yellow")
    return 0
