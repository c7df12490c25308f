"""``shardwise extract``: writes some tensors of a checkpoint to a safetensors file."""

from __future__ import annotations

import argparse

from shardwise.checkpoint.archive import open_archive
from shardwise.tools.cli.console import Console
from shardwise.tools.cli.contents import Contents, UsageError
from shardwise.tools.cli.rewriting import Rewriting
from shardwise.tools.cli.target import require_free_target
from shardwise.tools.cli.writing import write_safetensors_file

SUFFIX = ".safetensors"


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command."""
    if not options.target.endswith(SUFFIX):
        raise UsageError(f"the last argument is the file to write and ends with {SUFFIX}, found '{options.target}'")
    require_free_target(options.target, [options.source], folder=False, overwrite=options.overwrite)
    with open_archive(options.source) as archive:
        contents = Contents.of(archive).selected(options.names)
        if not contents.tensors:
            raise UsageError(f"{', '.join(options.names)}: no tensor, and a safetensors file holds nothing else")
        rewriting = Rewriting.of(Contents(contents.tensors, {}), options.dtype, options.max_memory)
        with console.progress("extracting", rewriting.nbytes) as on_read:
            write_safetensors_file(rewriting.with_progress(on_read), options.target)
    names = [tensor.name for tensor in rewriting.tensors]
    left_out = rewriting.note_left_out(console)
    console.give({"path": options.target, "tensors": names, "nbytes": rewriting.nbytes, **left_out})
    console.line(f"wrote {rewriting.summary('safetensors')}, to {options.target}", "green")
    return 0
