"""`measured_devices`: what the measurements of all ranks say of their devices, beside what the table says."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from shardwise.estimation.devices.device import Device, Rate
from shardwise.estimation.devices.fitting import Points, fit_line, median_error
from shardwise.estimation.devices.measuring import Measurement
from shardwise.estimation.devices.table import BLOCK, TABLE

UNKNOWN = {"cuda": "RTX4090", "cpu": "CPU"}  # devices of the table whose links stand for those not measured


@dataclass(frozen=True)
class Finding:
    """One rate of a device."""

    what: str
    unit: str
    rate: Rate
    error: float | None  # how far the rate is off at what was measured; None: it was not measured
    in_table: Rate | None


@dataclass(frozen=True)
class MeasuredDevice:
    """A device, how many ranks have one, and where its numbers come from."""

    device: Device
    ranks: int
    known: Device | None  # the same one in the table
    findings: tuple[Finding, ...]


def measured_devices(measurements: Iterable[Measurement]) -> list[MeasuredDevice]:
    """The devices that these ranks measured; ranks that share one have equal parts of it."""
    every = sorted(measurements, key=lambda one: one.number)
    return [_device(list(same), len(every)) for _, same in groupby(every, key=lambda one: one.number)]


def known_device(kind: str, name: str, memory: int) -> Device | None:
    """The device of the table that a vendor's name means, such as NVIDIA A100-SXM4-40GB; by memory where there are two.

    >>> known_device("cuda", "NVIDIA GeForce RTX 4090", 24 * 2**30).name
    'RTX4090'
    """
    if kind == "cpu":
        return TABLE["CPU"]
    words = {word.lower() for word in re.split(r"[\s_-]+", name.replace("RTX ", "RTX"))}
    same = [device for key, device in TABLE.items() if key.lower().partition("-")[0] in words]
    is_pcie = [device for device in same if device.name.endswith("PCIe") == ("pcie" in words)]
    return min(is_pcie or same, key=lambda device: abs(device.memory - memory), default=None)


def _device(ranks: Sequence[Measurement], in_all: int) -> MeasuredDevice:
    """The device that these ranks share, or that one of them has alone."""
    first = ranks[0]
    memory = min(one.memory for one in ranks)
    known = known_device(first.kind, first.name, memory)
    findings = [
        *(_finding(f"product {dtype}", "FLOP", ranks, "products", dtype, known) for dtype in first.products),
        *(_finding(f"attention {dtype}", "FLOP", ranks, "attention", dtype, known) for dtype in first.attention),
        *_link_findings(ranks, known),
    ]
    copied = _slowest([one.copies for one in ranks])
    copies = fit_line(copied)
    findings.insert(0, Finding("copy", "B", copies, median_error(copies, copied), known.copies if known else None))
    rates = {one.what: one.rate for one in findings}
    device = Device(
        name=first.name,
        kind=first.kind,
        memory=memory // len(ranks),
        products={dtype: rates[f"product {dtype}"] for dtype in first.products},
        attention={dtype: rates[f"attention {dtype}"] for dtype in first.attention},
        copies=copies,
        call=statistics.median(one.call for one in ranks),
        links={what: rate for what, rate in rates.items() if what.startswith(("machine", "network"))},
        per_machine=in_all,
        reserved=max(one.reserved for one in ranks),
        block=BLOCK if first.kind == "cuda" else 1,
    )
    return MeasuredDevice(device, len(ranks), known, tuple(findings))


def _finding(what: str, unit: str, ranks: Sequence[Measurement], of: str, name: str, known: Device | None) -> Finding:
    """The rate that fits the points of all ranks."""
    points = _slowest([getattr(one, of)[name] for one in ranks])
    rate = fit_line(points)
    in_table = None if known is None else getattr(known, of).get(name)
    return Finding(what, unit, rate, median_error(rate, points), in_table)


def _slowest(each: Sequence[Points]) -> Points:
    """For each amount the seconds of the rank that took longest: of those that share a device, others wait for it."""
    found: dict[float, float] = {}
    for points in each:
        for amount, seconds in points:
            found[amount] = max(seconds, found.get(amount, 0.0))
    return list(found.items())


def _link_findings(ranks: Sequence[Measurement], known: Device | None) -> list[Finding]:
    """The links within the machine, if there was anybody to send to; that to other machines cannot be measured here."""
    table = (known or TABLE[UNKNOWN[ranks[0].kind]]).links
    kinds = {what: [point for one in ranks for point in one.links[what]] for what in ranks[0].links}
    found = {"machine": [point for points in kinds.values() for point in points]}
    found |= {f"machine {what}": points for what, points in kinds.items()}
    findings = []
    for what, points in {**found, "network": []}.items():
        rate = fit_line(points) if points else table[what]
        error = median_error(rate, points) if points else None
        findings.append(Finding(what, "B", rate, error, known.link(*what.split()) if known else None))
    return findings
