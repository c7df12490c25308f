"""``shardwise reshard``: rewrites a checkpoint for another number of ranks, or another plan."""

from __future__ import annotations

import argparse
import math
from typing import Any

from shardwise.checkpoint.archive import open_archive
from shardwise.layout import Layout
from shardwise.layout.pictures.words import bytes_text, numbered
from shardwise.tools.cli.console import Console, names, numbers
from shardwise.tools.cli.contents import Contents, layout_summary
from shardwise.tools.cli.plan_file import DEFAULT_PLAN, plan_layouts, read_plan
from shardwise.tools.cli.rewriting import Rewriting
from shardwise.tools.cli.usage import add_memory, add_overwrite, add_selection, command, require_free_target
from shardwise.tools.cli.writing import write_checkpoint


def add(commands: Any) -> None:
    """Add the command."""
    parser = command(
        commands,
        "reshard",
        run,
        says="write a checkpoint for another number of ranks, or another plan",
        more="A job with these layouts then reads whole files; any other job can read it, too. No process group is "
        "needed. A plan is JSON: patterns of names, and for each the dim that is cut, or null for tensors that are "
        'whole on every rank; a list with one of those for each axis of --mesh; or {"dim": 0, "weights": [2, 1]}. '
        "The first pattern that matches holds; names that none matches are cut along dim 0.",
        examples="""
            shardwise reshard run/1000 run/1000-8 --ranks 8
            echo '{"*.bias": null, "*proj.weight": 1, "*": 0}' > plan.json
            shardwise reshard run/1000 run/1000-8 --ranks 8 --plan plan.json --max-memory 500MB
            echo '{"*": [null, 0]}' > plan.json
            shardwise reshard run/1000 run/1000-2x4 --mesh 2x4 --plan plan.json
        """,
    )
    parser.add_argument("source", metavar="A", help="the checkpoint, of any format")
    parser.add_argument("target", metavar="B", help="where to write the new one")
    ranks = parser.add_mutually_exclusive_group(required=True)
    ranks.add_argument("--ranks", type=_mesh, metavar="N", dest="mesh", help="the number of ranks")
    ranks.add_argument("--mesh", type=_mesh, metavar="NxM", dest="mesh", help="ranks on a mesh, such as 2x4")
    parser.add_argument("--plan", metavar="FILE", help="which tensors are cut how (default: all along dim 0)")
    add_selection(parser)
    add_memory(parser)
    add_overwrite(parser)


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
    written = f"{numbered(len(rewriting.tensors), 'tensor')}, {bytes_text(rewriting.nbytes)}"
    console.line(f"wrote {written} for {numbered(math.prod(options.mesh), 'rank')} to {options.target}", "green")
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


def _mesh(text: str) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"'{text}' is no number of ranks, such as 8 or 2x4")
    return tuple(map(int, parts))
