"""Lines through measured points, and measuring on real ranks. No test depends on how fast anything is."""

from __future__ import annotations

import math
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwise.errors import DeviceError
from shardwise.estimation.devices import measuring
from shardwise.estimation.devices.fitting import fit_line, median_error
from shardwise.estimation.devices.measured_devices import known_device, measured_devices
from shardwise.estimation.devices.measuring import Measurement, Sizes, measure
from shardwise.estimation.devices.table import TABLE
from shardwise.testing import run_on_ranks

SMALL = Sizes(
    products=[(4, 8, 8), (16, 32, 32)],
    attention=[(1, 1, 8, 8), (1, 2, 32, 16)],
    copies=[2**10, 2**14],
    links=[2**10, 2**14],
    repeats=1,
)


def test_a_fit_recovers_a_line_from_noisy_points() -> None:
    """Amounts over six decades: the start shows in the small ones, the speed in the large ones."""
    noise = random.Random(0)
    for per_second, start in ((1e9, 1e-4), (5e13, 4e-6), (2e3, 0.5)):
        amounts = [per_second * start * 10**power for power in range(-3, 4)] * 5
        points = [(amount, (start + amount / per_second) * noise.uniform(0.95, 1.05)) for amount in amounts]
        rate = fit_line(points)
        assert math.isclose(rate.per_second, per_second, rel_tol=0.05)
        assert math.isclose(rate.start, start, rel_tol=0.05)
        assert median_error(rate, points) < 0.05


def test_a_fit_is_a_rate_whatever_was_measured() -> None:
    """One point, points that start below 0, and larger amounts that took no longer."""
    assert fit_line([(10, 2.0)]).seconds(20) == 4.0
    assert fit_line([(10, 1.0), (100, 20.0)]).start == 0
    assert fit_line([(10, 2.0), (100, 1.0)]).per_second > 0
    for wrong in ([], [(0, 1.0)], [(1, 0.0)]):
        with pytest.raises(DeviceError, match="no line fits"):
            fit_line(wrong)


def test_ranks_measure_together() -> None:
    """On two local ranks every rate is positive and finite; the ranks have equal parts of the CPU."""
    (measured,) = measured_devices(run_on_ranks(2, measure, "cpu", SMALL))
    device = measured.device
    assert (measured.ranks, device.kind, device.per_machine, measured.known) == (2, "cpu", 2, TABLE["CPU"])
    assert set(device.products) == {"float64", "float32", "bfloat16", "float16"}
    assert set(device.attention) == {"float32", "bfloat16", "float16"}
    assert set(device.links) == {"machine", "machine gather", "machine sum", "machine exchange", "network"}
    for one in measured.findings:
        assert 0 < one.rate.per_second < math.inf
        assert 0 <= one.rate.start < math.inf
        assert (one.error is None) == (one.what == "network")
    assert 0 < device.call < math.inf
    assert device.memory > 0


def test_a_single_rank_has_the_links_of_the_table() -> None:
    """For it has nobody to send to."""
    (measured,) = measured_devices(run_on_ranks(1, measure, "cpu", SMALL))
    assert measured.device.links == TABLE["CPU"].links


def test_what_a_rank_sends_is_what_is_counted() -> None:
    """Of a tensor in equal parts: a part to each other rank, a part of a sum to each other rank, half of its rows."""
    (first, second) = run_on_ranks(2, measure, "cpu", SMALL)
    sent = {what: [amount for amount, _ in points] for what, points in first.links.items()}
    assert sent == {"gather": [512, 8192], "sum": [512, 8192], "exchange": [256, 4096]}
    assert first.links == second.links  # the seconds of the slowest rank, too


def measurement(name: str, number: int = 0, *, memory: int = 80 * 2**30) -> Measurement:
    """What a rank could have measured."""
    points = [(10.0, 1.0), (100.0, 2.0)]
    return Measurement(name, "cuda", number, memory, 0, 1, 1e-6, {"float32": points}, {"float32": points}, points)


def test_gpus_are_devices_of_their_own_and_ranks_may_share_one() -> None:
    """A GPU that the table does not know has assumed links."""
    first, second = measured_devices([measurement("NVIDIA H200", 1), measurement("NVIDIA H200", 0)])
    assert (first.ranks, second.ranks, first.device.memory) == (1, 1, 80 * 2**30)
    (shared,) = measured_devices([measurement("Xyz 1"), measurement("Xyz 1")])
    assert (shared.ranks, shared.device.memory, shared.known) == (2, 40 * 2**30, None)
    assert {one.what for one in shared.findings if one.error is None} == {"machine", "network"}
    assert shared.device.block == 512


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    [
        ("NVIDIA H100 80GB HBM3", 79, "H100-80GB"),
        ("NVIDIA H100 PCIe", 79, "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", 39, "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", 79, "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", 79, "A100-80GB"),
        ("NVIDIA GH200 480GB", 94, "GH200-96GB"),
        ("NVIDIA H200", 139, "H200-141GB"),
        ("NVIDIA GeForce RTX 4090", 23, "RTX4090"),
        ("NVIDIA A10G", 22, "A10G"),
        ("Tesla V100-SXM2-32GB", 31, "V100-32GB"),
        ("Tesla T4", 14, "T4"),
        ("AMD Instinct MI300X", 191, "MI300X-192GB"),
    ],
)
def test_vendors_names_are_found_in_the_table(name: str, gib: int, known: str) -> None:
    """By their words, and by memory where a model comes with more or less of it."""
    found = known_device("cuda", name, gib * 2**30)
    assert found is not None
    assert found.name == known


def measure_with_different_dtypes() -> list[str]:
    """Measures on ranks of which one knows no bfloat16."""
    if dist.get_rank() == 1:
        with mock.patch.object(measuring, "product_dtypes", return_value={"float32": torch.float32}):
            return list(measure("cpu", SMALL).products)
    return list(measure("cpu", SMALL).products)


def test_ranks_with_different_devices_measure_together() -> None:
    """What one of them cannot do, the others measure all the same."""
    some, few = run_on_ranks(2, measure_with_different_dtypes)
    assert (some, few) == (["float64", "float32", "bfloat16", "float16"], ["float32"])
