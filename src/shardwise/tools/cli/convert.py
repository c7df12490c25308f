"""``shardwise convert``: writes a checkpoint in another format."""

from __future__ import annotations

import argparse
from typing import Any

from shardwise.checkpoint.archive import open_archive
from shardwise.tools.cli.console import Console
from shardwise.tools.cli.contents import Contents, UsageError
from shardwise.tools.cli.model_files import copy_model_files, missing_for_transformers, model_files
from shardwise.tools.cli.reshard import print_files
from shardwise.tools.cli.rewriting import Rewriting
from shardwise.tools.cli.target import require_free_target
from shardwise.tools.cli.writing import (
    whole_layouts,
    write_checkpoint,
    write_dcp_folder,
    write_safetensors_file,
    write_safetensors_folder,
    write_torch_file,
)

SUFFIX = ".safetensors"


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command."""
    kind = options.to
    is_file = kind == "torch" or (kind == "safetensors" and options.target.endswith(SUFFIX))
    own = kind == "shardwise"
    is_model = kind == "safetensors" and not is_file
    if options.config is not None and not is_model:
        raise UsageError("--config is for a folder of safetensors, which transformers reads")
    beside = model_files(options.config, options.source) if is_model else None
    require_free_target(options.target, [options.source], folder=not is_file, own=own, overwrite=options.overwrite)
    with open_archive(options.source) as archive:
        contents = Contents.of(archive).selected(options.only).renamed(options.rename)
        rewriting = Rewriting.of(contents, options.dtype, options.max_memory)
        with console.progress("converting", rewriting.nbytes) as on_read:
            rewriting = rewriting.with_progress(on_read)
            if own:
                files = write_checkpoint(rewriting, options.target, whole_layouts(rewriting), 1)
            elif kind == "torch":
                files = write_torch_file(rewriting, options.target)
            elif kind == "dcp":
                files = write_dcp_folder(rewriting, options.target)
            elif is_file:
                files = write_safetensors_file(rewriting, options.target, rewriting.dotted())
            else:
                files = write_safetensors_folder(rewriting, options.target, options.max_shard_size)
    count, _, nbytes = rewriting.count(kind)
    answer: dict[str, Any] = {
        "path": options.target,
        "format": kind,
        "tensors": count,
        "nbytes": nbytes,
        "files": files,
    }
    left_out = rewriting.note_left_out(console) if kind == "safetensors" else {}
    if beside is not None:
        answer["copied"] = copy_model_files(beside, options.target, rewriting)
    if is_model:
        answer["missing"] = missing_for_transformers([tensor.name for tensor in rewriting.tensors], beside is not None)
    console.give({**answer, **left_out})
    print_files(files, console)
    if beside is not None:
        console.listing("copied:", beside[1], len(beside[1]), "")
    for missing in answer.get("missing", ()):
        console.line(f"from_pretrained cannot load it yet: {missing}", "yellow")
    console.line(f"wrote {rewriting.summary(kind)}, to {options.target}", "green")
    return 0
