"""``shardwise verify``: every byte of a checkpoint against its checksums."""

from __future__ import annotations

import argparse
from typing import Any

from shardwise.archive import open_archive
from shardwise.archive.index_file import INDEX
from shardwise.checkpoint import verify
from shardwise.cli.console import Console
from shardwise.cli.usage import command
from shardwise.errors import CheckpointError
from shardwise.storage import storage_at
from shardwise.viz.words import bytes_text, numbered


def add(commands: Any) -> None:
    """Add the command."""
    parser = command(
        commands,
        "verify",
        run,
        says="read all of a checkpoint, and check it against its checksums",
        more="Exit code 1 if anything is damaged: all of it is listed, by tensor, box and file. Formats without "
        "checksums are only checked for what they say of themselves.",
        examples="""
            shardwise verify run/1000
            shardwise verify s3://bucket/run/1000 --json
        """,
    )
    parser.add_argument("path", metavar="PATH", help="the checkpoint")


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command."""
    answer: dict[str, Any] = {"path": options.path}
    try:
        with open_archive(options.path) as archive:
            index = archive.index
        total = sum(stored.nbytes for stored in index.tensors.values())
        answer |= {"format": index.format, "tensors": len(index.tensors), "files": len(index.files), "nbytes": total}
        with console.progress("verifying", total) as told:
            verified = verify(options.path, told=told)
    except CheckpointError as error:
        if "format" not in answer and INDEX not in storage_at(options.path).names():
            raise  # there is no checkpoint of ours
        damage = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
        console.give({**answer, "whole": False, "damage": damage})
        console.line(f"{options.path} is damaged:", "red")
        for line in damage:
            console.line(f"  {line}")
        return 1
    console.give({**answer, "whole": True, "damage": [], "checksums": verified.checksums})
    told_of = (
        f"{numbered(verified.tensors, 'tensor')}, {bytes_text(verified.bytes)} in {numbered(verified.files, 'file')}"
    )
    if verified.checksums:
        console.line(f"whole: {told_of}", "green")
    else:
        console.line(f"readable: {told_of}; {verified.format} has no checksums, so bytes may have changed", "yellow")
    return 0
