"""The plan that `plans.auto` chooses, beside all plans of its space, each measured: `python -m benchmarks.choice`.

Two gloo ranks with a core each, of which the second one shares its core with a process that never rests. Both are
measured as `shardwise doctor --measure` does. Then each kind of plan takes a step with each way to deal the samples.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from benchmarks.set_ups import Block
from shardwise.estimation.devices.device import Device
from shardwise.estimation.devices.measured_devices import measured_devices
from shardwise.estimation.devices.measuring import Measurement, measure
from shardwise.estimation.planning import Candidate
from shardwise.testing import run_on_ranks

RANKS, BLOCKS, WIDTH, TOKENS, SAMPLES = 2, 4, 384, 64, 16
OTHERS = 1  # processes that share the core of the second rank
WARM_UP, STEPS = 2, 5


@contextlib.contextmanager
def as_device_of_rank() -> Iterator[None]:
    """Within this context, each rank has one core, and the second one shares it with processes that never rest."""
    torch.set_num_threads(1)
    before, core = os.sched_getaffinity(0), sorted(os.sched_getaffinity(0))[dist.get_rank()]
    os.sched_setaffinity(0, {core})
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(OTHERS * dist.get_rank())]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()
        os.sched_setaffinity(0, before)


def measured_device() -> Measurement:
    """What this rank finds out about its device, as one of its own."""
    with as_device_of_rank():
        return replace(measure("cpu"), number=dist.get_rank())


def model() -> nn.Module:
    """Blocks of two layers."""
    return nn.Sequential(*[Block(WIDTH) for _ in range(BLOCKS)])


def seconds_of(candidates: list[Candidate]) -> list[float]:
    """How long a step of each candidate takes."""
    found = []
    with as_device_of_rank():
        for candidate in candidates:
            torch.manual_seed(0)
            trained = candidate.apply(model())
            batch = candidate.cut(torch.ones(SAMPLES, TOKENS, WIDTH))
            optimizer = torch.optim.AdamW(trained.parameters())
            times = []
            for _ in range(WARM_UP + STEPS):
                dist.barrier()
                begun = time.perf_counter()
                trained(batch).float().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                dist.barrier()
                times.append(time.perf_counter() - begun)
            found.append(statistics.median(times[WARM_UP:]))
    return found


def _in_one_machine(device: Device) -> Device:
    """Devices that are named apart are in machines of their own, over a network: here it is as fast as the machine."""
    return replace(
        device, links={**device.links, **{f"network{k[7:]}": v for k, v in device.links.items() if k[:7] == "machine"}}
    )


def main() -> None:
    """Print a table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    measurements = run_on_ranks(RANKS, measured_device, timeout=600, fresh=True)
    devices = [_in_one_machine(one.device) for one in measured_devices(measurements)]
    plan = shardwise.plans.auto(model(), devices=devices, batch=torch.ones(SAMPLES, TOKENS, WIDTH), recompute=False)
    print(plan)
    dealt = [(count, SAMPLES - count) for count in range(SAMPLES // 2, SAMPLES, 2)]
    every = [Candidate(kind, 1, samples, None) for kind in ("fully sharded", "replicated") for samples in dealt]
    chosen = replace(plan.chosen, weights=None)
    seconds = run_on_ranks(RANKS, seconds_of, [chosen, *every], timeout=600, fresh=True)
    slowest = [max(each) for each in zip(*seconds, strict=True)]
    print(f"\n{'plan':16}{'samples':>10}{'a step':>12}")
    for one, took in zip(every, slowest[1:], strict=True):
        print(f"{one.name:16}{one.samples[0]:>5} + {one.samples[1]:<2}{took * 1e3:9.1f} ms")
    best = min(slowest[1:])
    print(f"chosen: {chosen.name}, {chosen.samples}: {slowest[0] * 1e3:.1f} ms, {slowest[0] / best:.2f} × the best one")


if __name__ == "__main__":
    from benchmarks import choice  # as the ranks import it

    choice.main()
