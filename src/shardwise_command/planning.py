"""The commands that plan the training of a model: `plan` and `estimate`, their options and help."""

from __future__ import annotations

import argparse
from typing import Any

from shardwise_command.suggestions import one_of
from shardwise_command.usage import command

OPTIMIZERS = ("adamw", "adam", "adagrad", "rmsprop", "sgd", "momentum")
PRECISIONS = ("bf16", "fp16", "fp32")


def add_plan(commands: Any) -> None:
    """Add `plan`."""
    parser = command(
        commands,
        "plan",
        says="find how to train a model on some devices: what fits, and what is fastest",
        more="The model is one of transformers, by its configuration: neither weights nor devices are needed, and "
        "nothing is downloaded. For each plan that is tried, the memory of every rank and the time of a step are "
        "predicted. Exit code 1 if no plan fits: said is which device lacks how much.",
        examples="""
            shardwise plan llama/ --devices 4xH100-80GB,2xRTX4090 --batch 8x4096 --precision bf16
            shardwise plan llama/config.json --devices 2xdevices.json --batch 16x2048 --write plan.json
            shardwise plan llama/ --devices 8xA100-40GB --batch 32x4096 --no-recompute --report report.html
        """,
    )
    _add_job(parser, is_planned=False)
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--recompute",
        action="store_true",
        default=None,
        help="compute activations again in the backward (default: where that is better)",
    )
    either.add_argument(
        "--no-recompute", dest="recompute", action="store_false", default=None, help="never compute them again"
    )
    parser.add_argument(
        "--report", metavar="FILE", help="write a page that shows the plans and the chosen one, as HTML"
    )
    parser.add_argument("--write", metavar="FILE", help="write the chosen plan to this file, as JSON")


def add_estimate(commands: Any) -> None:
    """Add `estimate`."""
    parser = command(
        commands,
        "estimate",
        says="predict memory and time of a step under a plan that 'plan --write' wrote",
        more="Devices, batch, optimizer and precision are those of the plan, unless others are given. Exit code 1 if a "
        "rank has too little memory.",
        examples="""
            shardwise estimate llama/ plan.json
            shardwise estimate llama/ plan.json --batch 8x8192 --report longer.html
        """,
    )
    _add_job(parser, is_planned=True)
    parser.add_argument("--report", metavar="FILE", help="write a page that shows the step, as HTML")


def _add_job(parser: argparse.ArgumentParser, *, is_planned: bool) -> None:
    """Add what a step is of; all of it may come from a plan."""
    parser.add_argument("model", metavar="MODEL", help="a folder with a config.json of transformers, or such a file")
    if is_planned:
        parser.add_argument("plan", metavar="PLAN", help="the file with the plan")
    default = " (default: the plan's)" if is_planned else ""
    parser.add_argument(
        "--devices",
        required=not is_planned,
        metavar="DEVICES",
        help=f"one for each rank: 4xH100-80GB,2xRTX4090, with less memory H100-80GB@60GiB, or a file of 'doctor "
        f"--measure'{default}",
    )
    parser.add_argument(
        "--batch",
        required=not is_planned,
        type=_batch,
        metavar="SAMPLESxLENGTH",
        help=f"of all ranks together, such as 8x4096{default}",
    )
    parser.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        type=one_of(OPTIMIZERS, "optimizer"),
        metavar="NAME",
        default=None if is_planned else OPTIMIZERS[0],
        help=f"{', '.join(OPTIMIZERS)}{default or f' (default: {OPTIMIZERS[0]})'}",
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        type=one_of(PRECISIONS, "precision"),
        help=f"of the parameters, and of what is computed with them{default or ' (default: as in the configuration)'}",
    )


def _batch(text: str) -> tuple[int, int]:
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"'{text}' is no batch of the form SAMPLESxLENGTH, such as 8x4096")
    return int(parts[0]), int(parts[1])
