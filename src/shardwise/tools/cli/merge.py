"""``shardwise merge``: joins checkpoints in one file, or in one checkpoint."""

from __future__ import annotations

import argparse
from contextlib import ExitStack

from shardwise.checkpoint.archive import open_archive
from shardwise.tools.cli.console import Console
from shardwise.tools.cli.contents import Contents, merge_contents, require_matches
from shardwise.tools.cli.rewriting import Rewriting
from shardwise.tools.cli.target import require_free_target
from shardwise.tools.cli.writing import whole_layouts, write_checkpoint, write_safetensors_file

SUFFIX = ".safetensors"


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command."""
    is_file = options.target.endswith(SUFFIX)
    require_free_target(options.target, options.sources, folder=not is_file, own=True, overwrite=options.overwrite)
    with ExitStack() as stack:
        each = [(path, Contents.of(stack.enter_context(open_archive(path)))) for path in options.sources]
        require_matches([contents for _, contents in each], options.only)
        chosen = [(path, contents.matching(options.only)) for path, contents in each]
        contents = merge_contents(chosen).renamed(options.rename)
        rewriting = Rewriting.of(contents, None, options.max_memory)
        with console.progress("merging", rewriting.nbytes) as on_read:
            rewriting = rewriting.with_progress(on_read)
            if is_file:
                write_safetensors_file(rewriting, options.target)
            else:
                write_checkpoint(rewriting, options.target, whole_layouts(rewriting), 1)
    kind = "safetensors" if is_file else "shardwise"
    (count, _, nbytes), left_out = rewriting.count(kind), rewriting.note_left_out(console) if is_file else {}
    console.give({"path": options.target, "tensors": count, "nbytes": nbytes, **left_out})
    console.line(f"wrote {rewriting.summary(kind)}, to {options.target}", "green")
    return 0
