"""A trainer, whose weights lie in pieces on its ranks, and an engine that serves them: two programs, started apart.

torchrun --nproc-per-node 2 examples/two_jobs.py trainer 127.0.0.1:29400    in one terminal
python examples/two_jobs.py engine 127.0.0.1:29400                          in another one

Start them in any order. End the engine and start it again, or the trainer: the other one goes on, and they meet anew.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

from shardwise import ShardwiseError, shard_module
from shardwise.state_transfer import StateTransfer

STEPS = 5
QUESTION = torch.linspace(-1, 1, 16, dtype=torch.float64)


def new_model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).double()


def trainer(address: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = shard_module(new_model(), {"0.*": 0, "2.weight": 1})  # tensor parallel, over the ranks of this job
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    transfer = StateTransfer.between(source=model, address=address, timeout=300)
    for step in range(1, STEPS + 1):
        x = torch.randn(32, 16, dtype=torch.float64)
        optimizer.zero_grad()
        (model(x) - x[:, :4].sin()).pow(2).mean().backward()
        optimizer.step()
        told = f"step {step} answers {model(QUESTION).sum().item():.9f}"
        try:
            transfer.run(version=step)
        except ShardwiseError as error:  # the same on every rank of this job: training goes on
            told += f", which no engine has taken: {error}"
        if dist.get_rank() == 0:
            print(told, flush=True)
    transfer.close()
    dist.destroy_process_group()


def engine(address: str) -> None:
    model = new_model()  # whole, in this process
    transfer = StateTransfer.between(target=model, address=address, timeout=300)
    while transfer.version < STEPS:
        try:
            transfer.run()  # or, while it serves: run(wait=False), and wait() once the handle is done()
        except ShardwiseError as error:  # the model is what it was before
            print(f"version {transfer.version} is served on: {error}", file=sys.stderr)
            continue
        print(f"version {transfer.version} answers {model(QUESTION).sum().item():.9f}", flush=True)
    transfer.close()


if __name__ == "__main__":
    {"trainer": trainer, "engine": engine}[sys.argv[1]](sys.argv[2])
