"""Modules with a list of experts that they call one by one, in the ways in which people write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Expert(nn.Module):
    """Gated, as those of Mixtral."""

    def __init__(self, width: int, inner: int = 5) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Any) -> Any:
        """Row by row."""
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class WeighingExpert(nn.Module):
    """An expert that multiplies by the weights of its tokens itself, as those of the first Mixtral did."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4), nn.Linear(4, width)

    def forward(self, x: Any, weights: Any) -> Any:
        """Row by row."""
        return self.down(torch.relu(self.up(x))) * weights


class ListBlock(nn.Module):
    """A router, and experts in a list; each token goes to some of them."""

    def __init__(self, experts: int = 7, choices: int = 2, width: int = 6) -> None:
        super().__init__()
        self.router, self.choices = nn.Linear(width, experts), choices
        self.experts = nn.ModuleList(self.expert(width) for _ in range(experts))

    def expert(self, width: int) -> nn.Module:
        """One of the list."""
        return Expert(width)

    def chosen(self, x: Any) -> tuple[Any, Any, Any]:
        """Scores, and the weights and numbers of the experts of each token."""
        scores = self.router(x)
        weights, chosen = torch.topk(torch.softmax(scores, -1), self.choices, -1)
        return scores, weights / weights.sum(-1, keepdim=True), chosen


class MaskBlock(ListBlock):
    """As Mixtral's block: a mask of all choices, and a loop over experts; gives the scores, too."""

    def forward(self, x: Any) -> Any:
        """The result, and the scores of all tokens."""
        tokens = x.reshape(-1, x.shape[-1])
        scores, weights, chosen = self.chosen(tokens)
        result = torch.zeros_like(tokens)
        mask = functional.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for number, expert in enumerate(self.experts):
            choice, token = torch.where(mask[number])
            rows = tokens[None, token].reshape(-1, tokens.shape[-1])
            result.index_add_(0, token, expert(rows) * weights[token, choice, None])
        return result.reshape(x.shape), scores


class HitBlock(ListBlock):
    """As Qwen's block: experts that no token has chosen are not called."""

    def forward(self, x: Any) -> Any:
        """The result alone."""
        _, weights, chosen = self.chosen(x)
        result = torch.zeros_like(x)
        for number in torch.unique(chosen).tolist():
            where = torch.where(chosen == number)
            result.index_put_(
                where[:-1], self.experts[number](x[where[:-1]]) * weights[where][:, None], accumulate=True
            )
        return result


class DenseBlock(ListBlock):
    """Every expert computes every token, and weights of zero leave most of it out."""

    def forward(self, x: Any) -> Any:
        """The result alone."""
        _, weights, chosen = self.chosen(x)
        each = torch.zeros(*x.shape[:-1], len(self.experts), dtype=x.dtype).scatter(-1, chosen, weights)
        return sum(each[..., number, None] * expert(x) for number, expert in enumerate(self.experts))


class WeighedBlock(ListBlock):
    """Experts take the weights of their tokens."""

    def expert(self, width: int) -> nn.Module:
        """With weights."""
        return WeighingExpert(width)

    def forward(self, x: Any) -> Any:
        """The result alone."""
        tokens = x.reshape(-1, x.shape[-1])
        _, weights, chosen = self.chosen(tokens)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(chosen == number)
            if len(token):
                result = result.index_add(0, token, expert(tokens[token], weights[token, choice, None]))
        return result.reshape(x.shape)


BLOCKS = {"mask": MaskBlock, "hit": HitBlock, "dense": DenseBlock, "weighed": WeighedBlock}


class ListModel(nn.Module):
    """A block between two layers."""

    def __init__(self, block: nn.Module, width: int = 6) -> None:
        super().__init__()
        self.before, self.block, self.behind = nn.Linear(width, width), block, nn.Linear(width, 2)

    def forward(self, x: Any) -> Any:
        """Scores for each token, and a loss of the router if the block gives its scores."""
        x = torch.tanh(self.before(x))
        made = self.block(x)
        made, scores = made if isinstance(made, tuple) else (made, None)
        result = self.behind(x + made)
        return result if scores is None else result + (torch.softmax(scores, -1) ** 2).mean()


def list_model(name: str, **options: Any) -> ListModel:
    """The same on every rank, in float64."""
    torch.manual_seed(3)
    return ListModel(BLOCKS[name](**options)).double()
