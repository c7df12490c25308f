"""The commands: their names, options and help. Their code is in `shardwise.tools.cli`, in a file for each."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from shardwise_command.completion import SHELLS
from shardwise_command.planning import add_estimate, add_plan
from shardwise_command.suggestions import one_of
from shardwise_command.usage import Formatter, Parser, add_memory, add_overwrite, add_selection, byte_count, command

FORMATS = ("shardwise", "safetensors", "torch", "dcp")

ABOUT = """\
Look at checkpoints, check, compare and rewrite them; plan the training of a model on devices that are not there.

A checkpoint is a folder that shardwise.save wrote; or one of Hugging Face (safetensors), torch.distributed.checkpoint
or torchsnapshot; or a file of torch.save or safetensors. It lies at a path, or at a URL such as s3://bucket/run."""

CODES = """\
exit codes: 0 all is well; 1 the answer is no (damage, differences, a failed self-test, too little memory); 2 wrong
usage or an error"""


def make_parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser of the whole command line, and that of each command; the result has its name as ``command``."""
    parser = Parser("shardwise", description=ABOUT, epilog=CODES, formatter_class=Formatter)
    parser.add_argument("--version", action="version", version=f"shardwise {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_inspect(commands)
    _add_verify(commands)
    _add_diff(commands)
    _add_reshard(commands)
    _add_convert(commands)
    _add_extract(commands)
    _add_merge(commands)
    add_plan(commands)
    add_estimate(commands)
    _add_doctor(commands)
    _add_completion(commands)
    return parser, commands.choices


def _version() -> str:
    try:
        return version("shardwise")
    except PackageNotFoundError:  # run from source
        return "(not installed)"


def _add_inspect(commands: Any) -> None:
    parser = command(
        commands,
        "inspect",
        says="show what is in a checkpoint, and where it lies",
        more="Only headers are read, no data.",
        examples="""
            shardwise inspect checkpoints/1000
            shardwise inspect checkpoints/1000 --only 'model/*.weight' --layouts
            shardwise inspect checkpoints/1000 --tensor model/embed.weight
            shardwise inspect s3://bucket/run/1000 --json | jq '.tensors | keys'
        """,
    )
    parser.add_argument("path", metavar="PATH", help="the checkpoint")
    add_selection(parser, rename=False)
    parser.add_argument("--tensor", metavar="NAME", help="all there is to say of one tensor")
    parser.add_argument("--layouts", action="store_true", help="draw how tensors lie in the files")


def _add_verify(commands: Any) -> None:
    parser = command(
        commands,
        "verify",
        says="read all of a checkpoint, and check it against its checksums",
        more="Exit code 1 if anything is damaged: all of it is listed, by tensor, box and file. Formats without "
        "checksums are only checked for what they say of themselves.",
        examples="""
            shardwise verify run/1000
            shardwise verify s3://bucket/run/1000 --json
        """,
    )
    parser.add_argument("path", metavar="PATH", help="the checkpoint")


def _add_diff(commands: Any) -> None:
    parser = command(
        commands,
        "diff",
        says="compare two checkpoints: names, sizes, dtypes, values",
        more="They may be of different formats; 'model/a.b' and 'model.a.b' are the same name, and a tied tensor that "
        "one of them holds under fewer names is the same tensor. Values are the same if |a - b| <= atol + rtol * |b|, "
        "and nan is nan; without tolerances, if they are equal. Listed are the largest relative differences first, by "
        "the norms of a - b and of b; integers and scalars come after weights. Exit code 1 if anything differs.",
        examples="""
            shardwise diff run/1000 run/2000
            shardwise diff run/1000 exported/ --only-a 'model/*' --rename-a 'model/*=*' --rtol 1e-2
            shardwise diff run/1000 run/2000 --only '*.weight' --top 5
            shardwise diff a.pt b.safetensors --json
        """,
    )
    parser.add_argument("a", metavar="A", help="one checkpoint")
    parser.add_argument("b", metavar="B", help="the other")
    parser.add_argument("--rtol", type=_tolerance, default=0.0, help="relative tolerance (default: 0)")
    parser.add_argument("--atol", type=_tolerance, default=0.0, help="absolute tolerance (default: 0)")
    parser.add_argument("--top", type=int, default=20, metavar="N", help="show the N largest differences (default: 20)")
    add_selection(parser, of=" of A or of B")
    for side in ("a", "b"):
        add_selection(parser, of=f" of {side.upper()}", suffix=f"-{side}")
    add_memory(parser)


def _add_reshard(commands: Any) -> None:
    parser = command(
        commands,
        "reshard",
        says="write a checkpoint for another number of ranks, or another sharding plan",
        more="A job with these layouts then reads whole files; any other job can read it, too. No process group is "
        "needed. A sharding plan is JSON: patterns of names, and for each the dim that is cut, or null for tensors "
        'that are whole on every rank; a list with one of those for each axis of --mesh; or {"dim": 0, "weights": '
        "[2, 1]}. The first pattern that matches holds; names that none matches are cut along dim 0.",
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


def _add_convert(commands: Any) -> None:
    parser = command(
        commands,
        "convert",
        says="write a checkpoint in another format",
        more="Read are checkpoints of shardwise, safetensors folders and files, torch.distributed.checkpoint, "
        "torchsnapshot and torch.save. Written are: shardwise; safetensors, a folder as Hugging Face has it (or one "
        "file, if B ends with .safetensors), which holds tensors only, with dots in their names; torch, a file of "
        "torch.save; dcp, a folder of torch.distributed.checkpoint. A checkpoint of shardwise gets one file: 'reshard' "
        "cuts it. A safetensors folder is loaded by from_pretrained if names are those of the model and --config gives "
        "its configuration; what is missing is said.",
        examples="""
            shardwise convert run/1000 exported --to safetensors --only 'model/*' --rename 'model/*=*' --config base/
            shardwise convert exported half --to safetensors --dtype bf16
            shardwise convert old.pt run/0 --to shardwise --rename '*=model/*'
            shardwise convert dcp-folder whole.pt --to torch
        """,
    )
    parser.add_argument("source", metavar="A", help="the checkpoint, of any format")
    parser.add_argument("target", metavar="B", help="where to write the new one")
    parser.add_argument(
        "--to", required=True, choices=FORMATS, type=one_of(FORMATS, "format"), help="the format of the new one"
    )
    parser.add_argument("--dtype", metavar="DTYPE", help="of all floating-point tensors, such as bf16 or float32")
    parser.add_argument(
        "--config",
        metavar="FOLDER",
        help="copy config.json and the tokenizer from this folder of a model (default: from A, if they are there)",
    )
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


def _add_extract(commands: Any) -> None:
    parser = command(
        commands,
        "extract",
        says="write some tensors, whole, to a safetensors file",
        more="Only what they are made of is read. They keep their names.",
        examples="""
            shardwise extract run/1000 model/embed.weight embed.safetensors
            shardwise extract run/1000 'model/layers.0.*' 'model/norm*' some.safetensors --dtype float32
        """,
    )
    parser.add_argument("source", metavar="PATH", help="the checkpoint, of any format")
    parser.add_argument("names", metavar="NAME", nargs="+", help="names, or patterns with *")
    parser.add_argument("target", metavar="OUT.safetensors", help="the file to write")
    parser.add_argument("--dtype", metavar="DTYPE", help="of all floating-point tensors, such as bf16 or float32")
    add_memory(parser)
    add_overwrite(parser)


def _add_merge(commands: Any) -> None:
    parser = command(
        commands,
        "merge",
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


def _add_doctor(commands: Any) -> None:
    parser = command(
        commands,
        "doctor",
        says="say what is installed here, and run a small self-test on local ranks",
        more="Versions, backends, devices and limits; then a few processes shard, move, multiply, differentiate, save "
        "and load. With --measure, ranks measure at the same time what their devices can do, instead of the self-test: "
        "products, attention, copies, calls and transfers. Exit code 1 if any of it fails.",
        examples="""
            shardwise doctor
            shardwise doctor --ranks 4 --json
            shardwise doctor --ranks 0
            shardwise doctor --measure devices.json
        """,
    )
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="of the self-test, 0 for none (default: 2); or that measure (default: one for each GPU, without a GPU "
        "one for each core, and 4 at most)",
    )
    parser.add_argument("--measure", metavar="FILE", help="write what the devices here can do to this file, as JSON")


def _add_completion(commands: Any) -> None:
    parser = command(
        commands,
        "completion",
        says="print a script by which a shell completes commands, options and paths",
        more="It is made by shtab, which the extra 'cli' installs.",
        examples="""
            shardwise completion bash > ~/.local/share/bash-completion/completions/shardwise
            shardwise completion zsh > ~/.zfunc/_shardwise
            shardwise completion fish > ~/.config/fish/completions/shardwise.fish
        """,
        json=False,
    )
    parser.add_argument("shell", choices=SHELLS, type=one_of(SHELLS, "shell"), help="the shell")


def _mesh(text: str) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"'{text}' is no number of ranks, such as 8 or 2x4")
    return tuple(map(int, parts))


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is no tolerance: give a number from 0 on")
    return value
