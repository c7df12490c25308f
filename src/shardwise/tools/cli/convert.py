"""``shardwise convert``: writes a checkpoint in another format."""

from __future__ import annotations

import argparse
from typing import Any

from shardwise.checkpoint.archive import open_archive
from shardwise.layout.pictures.words import bytes_text, numbered
from shardwise.tools.cli.console import Console
from shardwise.tools.cli.contents import Contents
from shardwise.tools.cli.reshard import print_files
from shardwise.tools.cli.rewriting import Rewriting
from shardwise.tools.cli.usage import add_memory, add_overwrite, add_selection, byte_count, command, require_free_target
from shardwise.tools.cli.writing import (
    whole_layouts,
    write_checkpoint,
    write_dcp_folder,
    write_safetensors_file,
    write_safetensors_folder,
    write_torch_file,
)

FORMATS = ("shardwise", "safetensors", "torch", "dcp")
SUFFIX = ".safetensors"


def add(commands: Any) -> None:
    """Add the command."""
    parser = command(
        commands,
        "convert",
        run,
        says="write a checkpoint in another format",
        more="Read are checkpoints of shardwise, safetensors folders and files, torch.distributed.checkpoint, "
        "torchsnapshot and torch.save. Written are: shardwise; safetensors, a folder as Hugging Face has it (or one "
        "file, if B ends with .safetensors), which holds tensors only, with dots in their names; torch, a file of "
        "torch.save; dcp, a folder of torch.distributed.checkpoint. A checkpoint of shardwise gets one file: 'reshard' "
        "cuts it.",
        examples="""
            shardwise convert run/1000 exported --to safetensors --only 'model/*' --rename 'model/*=*' --dtype bf16
            shardwise convert old.pt run/0 --to shardwise --rename '*=model/*'
            shardwise convert dcp-folder whole.pt --to torch
        """,
    )
    parser.add_argument("source", metavar="A", help="the checkpoint, of any format")
    parser.add_argument("target", metavar="B", help="where to write the new one")
    parser.add_argument("--to", required=True, choices=FORMATS, help="the format of the new one")
    parser.add_argument("--dtype", metavar="DTYPE", help="of all floating-point tensors, such as bf16 or float32")
    parser.add_argument(
        "--max-shard-size",
        type=byte_count,
        default=byte_count("5GB"),
        metavar="BYTES",
        help="of the files of a safetensors folder (default: 5GB)",
    )
    add_selection(parser)
    add_memory(parser)
    add_overwrite(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command."""
    kind = options.to
    is_file = kind == "torch" or (kind == "safetensors" and options.target.endswith(SUFFIX))
    own = kind == "shardwise"
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
    count, nbytes = len(rewriting.tensors), rewriting.nbytes
    answer = {"path": options.target, "format": kind, "tensors": count, "nbytes": nbytes, "files": files}
    left_out = rewriting.note_left_out(console) if kind == "safetensors" else {}
    console.give({**answer, **left_out})
    print_files(files, console)
    console.line(f"wrote {numbered(count, 'tensor')}, {bytes_text(nbytes)}, to {options.target}", "green")
    return 0
