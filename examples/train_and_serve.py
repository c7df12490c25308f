"""Four ranks train a language model; after each step two others serve it: the weights go there by one plan.

python examples/train_and_serve.py           six gloo ranks on this machine; the trainers are tensor parallel
python examples/train_and_serve.py --fsdp    the trainers use FSDP2 of torch
torchrun --nproc-per-node 6 examples/train_and_serve.py [--fsdp]
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise
from shardwise import StateTransfer, shard_module
from shardwise.testing import run_on_ranks

TRAINERS, SERVERS = [0, 1, 2, 3], [4, 5]
STEPS = 4
PROMPT = torch.tensor([[1, 2, 3]])


def language_model(seed: int) -> Any:
    """A tiny Llama, in float64: the same numbers on any number of ranks, but for rounding."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        eos_token_id=None,
    )
    made: Any = LlamaForCausalLM
    return made(config).double()


def trainer(group: Any, mesh: DeviceMesh, *, fsdp: bool) -> Any:
    """The model as the trainers have it."""
    model = language_model(seed=0)
    if fsdp:
        return fully_shard(model, mesh=mesh)
    return shard_module(model, shardwise.plans.tensor_parallel(model, process_group=group), process_group=group)


def server(group: Any) -> Any:
    """As the servers have it: other weights so far, and cut otherwise."""
    model = language_model(seed=1).eval()
    return shard_module(model, shardwise.plans.tensor_parallel(model, process_group=group), process_group=group)


def work(*, fsdp: bool) -> list[tuple[float, list[int], float]]:
    """On every rank: the loss of each step, what is generated after it, and how far the logits are apart."""
    groups = [dist.new_group(ranks) for ranks in (TRAINERS, SERVERS)]
    mesh = DeviceMesh("cpu", TRAINERS)
    trains = dist.get_rank() in TRAINERS
    model = trainer(groups[0], mesh, fsdp=fsdp) if trains else server(groups[1])
    # Each rank gives the side that it has; the other side's names and layouts come from the others.
    transfer = StateTransfer(model if trains else None, None if trains else model)
    if dist.get_rank() == 0:
        print(transfer.explain().splitlines()[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5) if trains else None
    sentences = (torch.arange(6) + torch.arange(4)[:, None]) % 32  # each word is followed by the next

    report = []
    for _ in range(STEPS):
        loss = torch.zeros((), dtype=torch.float64)
        if optimizer is not None:
            optimizer.zero_grad()
            found = model(input_ids=sentences, labels=sentences).loss
            found.backward()
            optimizer.step()
            loss = found.detach()
        transfer.run()
        with torch.no_grad():
            logits = whole(model(input_ids=PROMPT).logits)
            words = torch.zeros(1, 9, dtype=torch.int64)
            if not trains:
                words = whole(model.generate(PROMPT, max_new_tokens=6, do_sample=False))
        served = logits.clone()
        dist.broadcast(served, SERVERS[0])
        dist.broadcast(words, SERVERS[0])
        report.append((whole(loss).item(), words[0].tolist(), (logits - served).abs().max().item()))
    return report


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor, of a sharded or a plain one."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def show(report: list[tuple[float, list[int], float]]) -> None:
    """A line for each step."""
    for step, (loss, words, apart) in enumerate(report):
        print(f"step {step}  loss {loss:.4f}  served: {' '.join(map(str, words))}  logits differ by {apart:.0e}")
    print("The servers serve what the trainers have trained." if max(r[2] for r in report) < 1e-9 else "They differ.")


def main() -> None:
    """Use the ranks that torchrun started, or start six here."""
    fsdp = "--fsdp" in sys.argv
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        show(run_on_ranks(len(TRAINERS + SERVERS), work, fsdp=fsdp, echo=True)[0])
        return
    dist.init_process_group("gloo")
    report = work(fsdp=fsdp)
    if dist.get_rank() == 0:
        show(report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
