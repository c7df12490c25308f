"""``shardwise doctor --measure``: measures the devices of this machine, and writes what they can do to a file."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import shardwise
from shardwise.errors import DeviceError
from shardwise.estimation.devices import read_devices, write_devices
from shardwise.estimation.devices.device import Rate
from shardwise.estimation.devices.measured_devices import Finding, MeasuredDevice, measured_devices
from shardwise.estimation.devices.measuring import measure
from shardwise.layout.pictures.words import bytes_text, numbered
from shardwise.testing import RankFailure, run_on_ranks
from shardwise.tools.cli.console import Column, Console, names, numbers

MOST_RANKS = 4  # on a CPU, unless more are asked for


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure, print a table and write the file; gives the answer for ``--json``, with ``ok``."""
    path = Path(options.measure)
    _require_writable(path)
    kind, ranks = _kind_and_ranks(options.ranks)
    shared = f"at the same time on {numbered(ranks, 'rank')}" if ranks > 1 else "on one rank"
    console.line()
    console.line(f"measuring {shared}, about half a minute", "bold")
    begun = time.monotonic()
    try:
        measurements = run_on_ranks(ranks, measure, kind, backend="nccl" if kind == "cuda" else "gloo", fresh=True)
    except (RankFailure, RuntimeError, OSError) as failure:
        error = str(failure).strip()
        console.line(f"nothing was written, for measuring failed: {error}", "red")
        return {"ok": False, "error": error}
    found = measured_devices(measurements)
    about = {"shardwise": shardwise.__version__, "torch": torch.__version__, "threads": measurements[0].threads}
    write_devices(path, [one.device for one in found for _ in range(one.ranks)], **about)
    for one in found:
        _print_device(one, measurements[0].threads, console)
    console.line(f"written to {path} after {time.monotonic() - begun:.0f} s", "green")
    return {"ok": True, "path": str(path), "devices": [one.device.as_json() for one in found]}


def _require_writable(path: Path) -> None:
    """Before anything is measured: the folder is there, and no other file would be replaced."""
    if not os.access(path.parent, os.W_OK):
        raise DeviceError(f"cannot write '{path}': there is no folder '{path.parent}' to write to")
    if path.exists():
        try:
            read_devices(path)
        except (DeviceError, OSError):
            raise DeviceError(f"'{path}' is there, and describes no devices: give the path of a new file") from None


def _kind_and_ranks(asked: int | None) -> tuple[str, int]:
    if asked is not None and asked < 1:
        raise DeviceError(f"--measure needs a rank at least, not {asked}")
    if torch.cuda.is_available():
        return "cuda", asked or torch.cuda.device_count()
    return "cpu", asked or min(MOST_RANKS, len(os.sched_getaffinity(0)))


def _print_device(one: MeasuredDevice, threads: int, console: Console) -> None:
    device = one.device
    console.line()
    if device.kind == "cpu":
        who = f", for each of {numbered(one.ranks, 'rank')} with {numbered(threads, 'thread')}"
    else:
        who = f", for each of {one.ranks} ranks that share it" if one.ranks > 1 else ""
    title = f"{device.name}{who}: {bytes_text(device.memory)} of memory, {device.call * 1e6:.1f} µs for an op"
    if device.reserved:
        title += f", {bytes_text(device.reserved)} kept by libraries"
    columns = [names("what"), numbers("measured"), numbers("start"), numbers("off by"), numbers("table"), Column("")]
    console.table(columns, _rows(one.findings), title)
    known = "not in the table" if one.known is None else f"the table's {one.known.name}"
    console.line(f"table: {known}; off by: the median error of a straight line", "dim")


def _rows(findings: Sequence[Finding]) -> list[list[str]]:
    rows = []
    for one in findings:
        off = "" if one.error is None else f"{one.error:.0%}"
        remark = "assumed, not measured" if one.error is None else ""
        table = "" if one.in_table is None else _speed(one.in_table, one.unit)
        rows.append([one.what, _speed(one.rate, one.unit), f"{one.rate.start * 1e6:.1f} µs", off, table, remark])
    return rows


def _speed(rate: Rate, unit: str) -> str:
    """The speed of a rate with three digits: ``93.3 GFLOP/s``."""
    value, prefixes = rate.per_second / 1e6, "MGTP"
    while value >= 1000 and len(prefixes) > 1:
        value, prefixes = value / 1000, prefixes[1:]
    return f"{value:.3g} {prefixes[0]}{unit}/s"
