"""``shardwise reshard``: rewrites a checkpoint for another number of ranks, or another plan."""

from __future__ import annotations

import argparse
import math

from shardwise.checkpoint.archive import open_archive
from shardwise.layout import Layout
from shardwise.layout.pictures.words import bytes_text, numbered
from shardwise.tools.cli.console import Console, names, numbers
from shardwise.tools.cli.contents import Contents, layout_summary
from shardwise.tools.cli.plan_file import DEFAULT_PLAN, plan_layouts, read_plan
from shardwise.tools.cli.rewriting import Rewriting
from shardwise.tools.cli.target import require_free_target
from shardwise.tools.cli.writing import write_checkpoint


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command."""
    plan = DEFAULT_PLAN if options.plan is None else read_plan(options.plan)
    require_free_target(options.target, [options.source], folder=True, own=True, overwrite=options.overwrite)
    with open_archive(options.source) as archive:
        contents = Contents.of(archive).selected(options.only).renamed(options.rename)
        rewriting = Rewriting.of(contents, None, options.max_memory)
        layouts = plan_layouts(plan, {tensor.name: tensor.size for tensor in rewriting.tensors}, options.mesh)
        files = write_resharded(rewriting, options.target, layouts, math.prod(options.mesh), console)
    console.give(
        {
            "path": options.target,
            "nbytes": rewriting.nbytes,
            "files": files,
            "tensors": {name: _describe(layout) for name, layout in layouts.items()},
        }
    )
    print_files(files, console)
    ranks = numbered(math.prod(options.mesh), "rank")
    console.line(f"wrote {rewriting.summary('shardwise')}, for {ranks} to {options.target}", "green")
    return 0


def write_resharded(
    rewriting: Rewriting, target: str, layouts: dict[str, Layout | None], ranks: int, console: Console
) -> dict[str, int]:
    """Write the checkpoint, with a progress bar."""
    with console.progress("writing", rewriting.nbytes) as on_read:
        return write_checkpoint(rewriting.with_progress(on_read), target, layouts, ranks)


def print_files(files: dict[str, int], console: Console) -> None:
    """Print the files that were written."""
    console.table([names("file"), numbers("bytes")], [[name, bytes_text(size)] for name, size in files.items()])


def _describe(layout: Layout | None) -> str:
    return "whole on every rank" if layout is None else layout_summary(layout)
