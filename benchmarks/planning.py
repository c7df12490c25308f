"""How long it takes to plan and to estimate Llama-3-70B on 64 devices of two kinds: `python -m benchmarks.planning`.

The budgets are 10 s for the plan, 30 s and 2 GiB for the estimate of all 80 layers.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import torch

from shardwise import plans
from shardwise.estimation.planning import Candidate, estimate_candidate

DEVICES, BATCH = "32xH100-80GB,32xA100-80GB", (128, 4096)
GIB = 2**20  # as the system counts, in KiB


def llama() -> Any:
    """Llama-3-70B without data."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def main() -> None:
    """Print times and memory."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    model = llama()
    begun, spent = time.perf_counter(), time.process_time()
    plan = plans.auto(model, devices=DEVICES, batch=BATCH, optimizer="adamw", precision="bf16")
    print(plan)
    print(f"\nplanned in {time.perf_counter() - begun:.1f} s, {time.process_time() - spent:.1f} s of a processor")
    even = Candidate("fully sharded", 1, (BATCH[0] // len(plan.devices),) * len(plan.devices), None)
    for candidate in (even, plan.chosen):
        begun, spent = time.perf_counter(), time.process_time()
        needs = estimate_candidate(model, candidate, devices=DEVICES, batch=BATCH, precision="bf16")
        print(f"estimated all layers, {candidate.name}, in {time.perf_counter() - begun:.1f} s, ", end="")
        print(f"{time.process_time() - spent:.1f} s of a processor: {needs.seconds:.2f} s a step, ", end="")
        print(f"{needs.peak / 2**30:.1f} GiB of a rank; ", end="")
        print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / GIB:.2f} GiB of this process", flush=True)


if __name__ == "__main__":
    main()
