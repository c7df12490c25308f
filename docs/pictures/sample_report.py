"""Writes the sample report of the documentation, docs/_static/report.html: python docs/pictures/sample_report.py"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import shardwise
from shardwise.report import Report, save_page

FILE = Path(__file__).parent.parent / "_static" / "report.html"
DEVICES, WEIGHTS, SAMPLES = "2xH100-80GB,2xA100-40GB", [2, 2, 1, 1], [6, 6, 2, 2]
WORDS, WIDTH, HEADS, LENGTH, BLOCKS = 32_000, 4096, 32, 2048, 4


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then two layers, each added to its input."""
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.qkv(self.first(x)).chunk(3, -1))
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        made: torch.Tensor = x + self.down(gelu(self.up(self.second(x))))
        return made


class Transformer(nn.Module):
    """A language model."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The logits of the next words."""
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def set_up() -> Callable[[], None]:
    """The model as each rank has it, and a function that takes a step."""
    with torch.device("meta"):
        model = Transformer()
    shardwise.fully_shard(model, weights=WEIGHTS)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros(SAMPLES[dist.get_rank()], LENGTH, dtype=torch.long)
    batch = shardwise.from_local(ids, 0, sizes=SAMPLES)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(batch)
        cross_entropy(logits.float().flatten(0, 1), batch.flatten()).backward()  # type: ignore[no-untyped-call] # torch's
        optimizer.step()
        optimizer.zero_grad()

    return step


def report() -> Report:
    """What a step needs on four unequal devices."""
    needs = shardwise.estimate(set_up, devices=DEVICES, name=f"a transformer of {BLOCKS} blocks on {DEVICES}")
    return needs.report()


def main() -> None:
    """Write it."""
    save_page(report(), FILE)


if __name__ == "__main__":
    main()
