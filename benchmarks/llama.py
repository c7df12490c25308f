"""A small model like Llama, of plain modules; the same code for plain tensors, shardwise, DTensor and FSDP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 # as everybody calls it
from torch import Tensor, nn

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Shape:
    """How large the model is, and its batch."""

    layers: int = 2
    width: int = 256
    head: int = 32
    words: int = 1024
    batch: int = 8
    sequence: int = 64

    @property
    def heads(self) -> int:
        """Of attention."""
        return self.width // self.head

    @property
    def inner(self) -> int:
        """Features between gate, up and down: two thirds of four times the width, in steps of 64."""
        return -(-8 * self.width // 3 // 64) * 64


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head = shape.head
        self.q, self.k, self.v, self.o = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k, v = (self._heads(part(x)) for part in (self.q, self.k, self.v))
        q, k = (part * cos + _turned(part) * sin for part in (q, k))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Any) -> Any:
        return x.unflatten(-1, (-1, self.head)).transpose(1, 2)


def _turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(shape.width, shape.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(shape.width), nn.RMSNorm(shape.width)
        self.attention, self.feed_forward = Attention(shape), FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.words, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.words, bias=False)
        rates = 10_000.0 ** (-torch.arange(0, shape.head, 2) / shape.head)
        angles = torch.outer(torch.arange(shape.sequence), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: Tensor) -> Any:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, shape: Shape, device: str = "cpu") -> Step:
    """Forward, loss, backward and a step of the optimizer, on one batch."""
    ids, labels = torch.randint(shape.words, (2, shape.batch, shape.sequence), device=device)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, ids, labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
