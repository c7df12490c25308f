"""``shardwise merge``: checkpoints put together in one file, or in one checkpoint."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any

from shardwise.archive import open_archive
from shardwise.cli.console import Console
from shardwise.cli.contents import Contents, merged, require_matches
from shardwise.cli.foreign_formats import write_file
from shardwise.cli.own_format import all_whole, write_own
from shardwise.cli.rewriting import Rewriting
from shardwise.cli.targets import require_free
from shardwise.cli.usage import add_memory, add_overwrite, add_selection, command
from shardwise.viz.words import bytes_text, numbered

SUFFIX = ".safetensors"


def add(commands: Any) -> None:
    """Add the command."""
    parser = command(
        commands,
        "merge",
        run,
        says="put checkpoints together, into one file or one checkpoint",
        more="They have no name in common, or there is just one. OUT is a safetensors file if it ends with "
        ".safetensors, which holds tensors only; else a checkpoint of one file.",
        examples="""
            shardwise merge run/1000 whole.safetensors --only 'model/*'
            shardwise merge encoder/ decoder/ both
        """,
    )
    parser.add_argument("sources", metavar="A", nargs="+", help="the checkpoints, of any formats")
    parser.add_argument("target", metavar="OUT", help="where to write")
    add_selection(parser)
    add_memory(parser)
    add_overwrite(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command."""
    is_file = options.target.endswith(SUFFIX)
    require_free(options.target, options.sources, folder=not is_file, own=True, overwrite=options.overwrite)
    with ExitStack() as stack:
        each = [(path, Contents.of(stack.enter_context(open_archive(path)))) for path in options.sources]
        require_matches([contents for _, contents in each], options.only)
        chosen = [(path, contents.matching(options.only)) for path, contents in each]
        contents = merged(chosen).renamed(options.rename)
        rewriting = Rewriting.of(contents, None, options.max_memory)
        with console.progress("merging", rewriting.nbytes) as told:
            rewriting = rewriting.telling(told)
            if is_file:
                write_file(rewriting, options.target)
            else:
                write_own(rewriting, options.target, all_whole(rewriting), 1)
    count, left_out = len(rewriting.tensors), rewriting.tell_left_out(console) if is_file else {}
    console.give({"path": options.target, "tensors": count, "nbytes": rewriting.nbytes, **left_out})
    console.line(f"wrote {numbered(count, 'tensor')}, {bytes_text(rewriting.nbytes)}, to {options.target}", "green")
    return 0
