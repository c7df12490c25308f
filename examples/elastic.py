"""Lose a machine in the middle of a training, and go on with the one that is left: the loss is that of one process.

python examples/elastic.py       starts two elastic agents of torchrun, two ranks each, that stand for two machines

The second machine dies at step 12, its agent and its ranks with it. The ranks of the first one find out at once, and
fail; their agent waits for a new rendezvous, starts them again, and four ranks have become two. They load the last
checkpoint, which four ranks have saved, into the layouts that two ranks have.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import shardwise

STEPS, EVERY, DIES_AT = 20, 5, 12  # a checkpoint after the steps 0, 5, 10 and so on
TOLERANCE = 1e-12  # in float64; a sum of parts rounds differently than the whole sum
LIMIT = 600  # seconds: eight processes are started one after another, which takes long on a machine that is busy

# How long agents wait: for a machine that may still come, and for a sign of life of one that is there.
RENDEZVOUS = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=6"


def model_and_optimizer(sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of two layers, whole or in pieces on all ranks that there are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8)).double()
    if not sharded:
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    shardwise.shard_module(model, {"0.*": 0, "2.weight": 1, "2.bias": None})
    named = dict(model.named_parameters())
    return model, shardwise.ShardedOptimizer(named, torch.optim.SGD, lr=0.05, momentum=0.9)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step on the batch of that number; gives the loss."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 32, dtype=torch.float64, generator=generator)
    optimizer.zero_grad()
    loss: torch.Tensor = (model(x) - x[:, :8].sin()).pow(2).mean()
    loss.backward()  # type: ignore[no-untyped-call] # torch's
    optimizer.step()
    return loss.item()


def work(folder: Path) -> None:
    """What torchrun starts on every rank, after each failure anew."""
    agent = os.getppid()
    while os.environ["WORLD_SIZE"] == "2" and not (folder / "died").exists():
        time.sleep(0.1)  # the second machine is late: when it comes, its agent has all ranks started anew
    dist.init_process_group("gloo")
    model, optimizer = model_and_optimizer(sharded=True)
    state = {"model": model, "optimizer": optimizer}
    with shardwise.Checkpoints(folder / "checkpoints", every=EVERY, keep=2, wait=False) as checkpoints:
        last = checkpoints.resume(state)
        for step in range(0 if last is None else last + 1, STEPS):
            if step == DIES_AT and os.environ["MACHINE"] == "1":
                power_cut(folder, agent)
            loss = train_step(model, optimizer, step)
            if dist.get_rank() == 0:
                line = {"world": dist.get_world_size(), "from": last, "step": step, "loss": loss}
                with (folder / "losses").open("a") as file:
                    print(json.dumps(line), file=file)
            checkpoints.save(step, state)
    dist.destroy_process_group()


def power_cut(folder: Path, agent: int) -> None:
    """End this machine: the agent and this rank. The other rank does the same, or finds out as those elsewhere do."""
    (folder / "died").touch()
    with suppress(ProcessLookupError):  # it has
        os.kill(agent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


# The two machines -----------------------------------------------------------------------------------------------------


def start_machine(folder: Path, port: int, *, is_host: bool) -> subprocess.Popen[bytes]:
    """An elastic agent; the first one keeps the store by which all find each other."""
    options = ["--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=3", "--local-addr=127.0.0.1"]
    options += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=elastic"]
    options += [f"--rdzv-conf=is_host={int(is_host)},{RENDEZVOUS}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, __file__, f"--folder={folder}"]
    # An agent keeps one store for all rendezvous, unless it is told otherwise; the ranks that it starts anew would find
    # the addresses of the dead ones there, and wait for them.
    fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    number = "0" if is_host else "1"
    environment = {**os.environ, **fresh, "MACHINE": number, "OMP_NUM_THREADS": "1"}
    with (folder / f"machine-{number}.txt").open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment)


def run(folder: Path) -> list[dict[str, float]]:
    """Train on two machines, of which one is lost; gives what the ranks have noted."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    machines = [start_machine(folder, port, is_host=is_host) for is_host in (True, False)]
    end = time.monotonic() + LIMIT

    def go_on() -> bool:
        """Whether the first machine is at work, and the second one, too, or has been lost as it should be."""
        there = [machine.poll() is None for machine in machines]
        return there[0] and (there[1] or (folder / "died").exists()) and time.monotonic() < end

    while go_on():
        time.sleep(0.1)
    codes = [machine.poll() for machine in machines]  # None: at work
    for machine in machines:
        machine.terminate()  # then an agent ends its ranks
        machine.wait()
    if codes[0] != 0:
        texts = [(folder / f"machine-{number}.txt").read_text()[-4000:] for number in range(2)]
        raise RuntimeError("\n".join(f"machine {k} ended with {codes[k]}:\n{text}" for k, text in enumerate(texts)))
    return [json.loads(line) for line in (folder / "losses").read_text().splitlines()]


def main() -> int:
    """The ranks of torchrun train; whoever calls it else starts the machines, and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the ranks meet; torchrun gives it to them")
    options = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        work(options.folder)
        return 0
    begun = time.monotonic()
    model, optimizer = model_and_optimizer(sharded=False)
    twin = [train_step(model, optimizer, step) for step in range(STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        noted = run(Path(folder))
        died = (Path(folder) / "died").exists()
    print("ranks  step  loss              one process")
    for line in noted:
        step = int(line["step"])
        if step and line["from"] == step - 1:
            print(f"   a machine is lost; {line['world']} ranks go on from the checkpoint of step {line['from']}")
        print(f"{line['world']:5}  {step:4}  {line['loss']:.14f}  {twin[step]:.14f}")
    worst = max(abs(line["loss"] - twin[int(line["step"])]) for line in noted)
    worlds = [line["world"] for line in noted]
    same = died and worst < TOLERANCE and worlds[0] == 4 and worlds[-1] == 2 and noted[-1]["step"] == STEPS - 1
    print(f"{time.monotonic() - begun:.0f} s; the losses differ by at most {worst:.0e}.")
    print("Four ranks, then two: the same training." if same else "NOT the same training.")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
