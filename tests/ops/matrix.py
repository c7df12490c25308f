"""Ops to try on every layout: by family, each a function of tensors that may be plain or sharded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

numbers = functools.partial(torch.arange, dtype=torch.float64)
ones = functools.partial(torch.ones, dtype=torch.float64)

Function = Callable[[Any, Any], Any]  # of two tensors of size (7, 6), in float64

FAMILIES: dict[str, dict[str, Function]] = {
    "pointwise": {
        "add": lambda x, y: x + y,
        "scalar on the left": lambda x, y: 2 - x,
        "mixed dtypes": lambda x, y: x.float() * y,
        "in place": lambda x, y: (x * 1).add_(y).mul_(3),
        "out": lambda x, y: torch.add(x.detach(), y.detach(), out=torch.empty_like(x)),
        "where": lambda x, y: torch.where(x > y, x, y * 2),
        "clamp": lambda x, y: x.clamp(-0.5, 0.5) + x.clamp(min=y),
        "lerp": lambda x, y: torch.lerp(x, y, 0.3),
        "masked_fill": lambda x, y: x.masked_fill(y > 0, 7.0),
        "a row of a plain tensor": lambda x, y: x * numbers(6),
        "a column of a plain tensor": lambda x, y: numbers(7)[:, None] - x,
        "a row of a sharded tensor": lambda x, y: x + y[3],
        "a column of a sharded tensor": lambda x, y: x / (y[:, :1] + 9),
        "functions": lambda x, y: F.gelu(x) + F.silu(y) + torch.erf(x).sigmoid() + F.leaky_relu(y),
        "special": lambda x, y: torch.special.expit(x) + torch.special.xlogy(x.abs() + 1, y.abs() + 1),
        "comparison": lambda x, y: (x > y) & (x != 0) | (x <= 1),
        "addcmul": lambda x, y: torch.addcmul(x, y, y, value=0.5),
        "pow": lambda x, y: x.abs() ** 1.5 + 2**y,
        "int": lambda x, y: (x * 10).int() // 3 + (y * 4).long() % 3,
        "dropout that keeps all": lambda x, y: F.dropout(x, 0.0),
    },
    "reduction": {
        "sum": lambda x, y: x.sum(),
        "sum of rows": lambda x, y: x.sum(0),
        "sum of columns, kept": lambda x, y: x.sum(1, keepdim=True),
        "mean": lambda x, y: x.mean(),
        "mean of rows": lambda x, y: x.mean(0),
        "prod": lambda x, y: x.prod(0),
        "amax": lambda x, y: x.amax(),
        "amin": lambda x, y: x.amin(1),
        "ties are spread": lambda x, y: (x * 2).round().amax(0),
        "max": lambda x, y: x.max(),
        "max with index": lambda x, y: torch.cat([x.max(1).values, x.max(1).indices.to(x.dtype)]),
        "argmax": lambda x, y: x.argmax(),
        "argmin of rows": lambda x, y: x.argmin(0),
        "any": lambda x, y: (x > 1).any(0),
        "all": lambda x, y: (x < 9).all(),
        "norm": lambda x, y: x.norm() + torch.linalg.vector_norm(x, 1) + torch.linalg.vector_norm(x, float("inf")),
        "norm of rows": lambda x, y: torch.linalg.vector_norm(x, 3, dim=0),
        "var": lambda x, y: x.var(),
        "std of rows": lambda x, y: x.std(0),
        "var and mean": lambda x, y: torch.stack(torch.var_mean(x, 1)),
        "logsumexp": lambda x, y: x.logsumexp(0) + x.logsumexp((0, 1)),
        "count_nonzero": lambda x, y: (x > 0).count_nonzero(),
        "cumsum": lambda x, y: x.cumsum(0) + x.cumsum(1),
        "softmax": lambda x, y: x.softmax(0) + x.log_softmax(1),
        "sort": lambda x, y: x.sort(0).values,
        "topk": lambda x, y: x.topk(2, 1).values,
    },
    "shape": {
        "transpose": lambda x, y: x.t(),
        "permute": lambda x, y: x[None].permute(2, 0, 1),
        "view": lambda x, y: x.reshape(42),
        "a dim in two": lambda x, y: x.reshape(7, 2, 3),
        "rows that no longer match": lambda x, y: x.reshape(3, 14),
        "flatten": lambda x, y: x[:, None].flatten(1),
        "squeeze and unsqueeze": lambda x, y: x.unsqueeze(1).squeeze(1).unsqueeze(-1),
        "expand": lambda x, y: x[None].expand(3, 7, 6),
        "narrow": lambda x, y: x.narrow(0, 2, 3),
        "select": lambda x, y: x[3] + x[-1],
        "column": lambda x, y: x[:, 2],
        "slices": lambda x, y: x[1:6:2, -4:],
        "ellipsis and None": lambda x, y: x[..., None, 1:],
        "chunk": lambda x, y: x.chunk(3, 1)[1],
        "split": lambda x, y: x.split([2, 4, 1])[1],
        "unbind": lambda x, y: x.unbind(0)[4],
        "cat": lambda x, y: torch.cat([x, y], 1),
        "cat of rows": lambda x, y: torch.cat([x, y * 2]),
        "cat with a plain one": lambda x, y: torch.cat([x, ones(2, 6)]),
        "stack": lambda x, y: torch.stack([x, y], 1),
        "flip": lambda x, y: x.flip(0, 1),
        "roll": lambda x, y: x.roll(2, 0),
        "repeat": lambda x, y: x.repeat(2, 1),
        "tril": lambda x, y: x.tril(),
        "diagonal": lambda x, y: x.diagonal(1),
        "contiguous": lambda x, y: x.t().contiguous(),
        "indices": lambda x, y: x[torch.tensor([5, 0, 0])],
        "gather": lambda x, y: torch.gather(x, 1, torch.tensor([[0, 5]] * 7)),
        "index_select": lambda x, y: x.index_select(1, torch.tensor([1, 1, 4])),
    },
    "products": {
        "mm": lambda x, y: x @ y.t(),
        "mm over rows": lambda x, y: x.t() @ y,
        "a plain matrix": lambda x, y: x @ numbers(12).reshape(6, 2),
        "a plain matrix on the left": lambda x, y: numbers(14).reshape(2, 7) @ x,
        "mv": lambda x, y: x @ numbers(6),
        "dot": lambda x, y: x[0].dot(y[1]),
        "bmm": lambda x, y: torch.bmm(x.reshape(7, 2, 3), y.reshape(7, 3, 2)),
        "matmul in batches": lambda x, y: x.reshape(7, 2, 3) @ numbers(6).reshape(3, 2),
        "addmm": lambda x, y: torch.addmm(ones(7), x, y.t(), alpha=2, beta=3),
        "einsum": lambda x, y: torch.einsum("ij,kj->ki", x, y) + torch.einsum("ij,ij->", x, y),
        "outer": lambda x, y: torch.outer(x[:, 0], y[0]),
        "layer_norm": lambda x, y: F.layer_norm(x, (6,), numbers(6), ones(6)),
        "layer_norm over a cut dim": lambda x, y: F.layer_norm(x.t(), (7,)),
        "cross_entropy": lambda x, y: F.cross_entropy(x, torch.arange(7) % 6),
        "cross_entropy, sum, weights, ignored": lambda x, y: F.cross_entropy(
            x, torch.tensor([0, 1, -100, 3, 4, 5, 0]), 1 + numbers(6), reduction="sum"
        ),
        "mse_loss": lambda x, y: F.mse_loss(x, y),
        "smooth_l1_loss": lambda x, y: F.smooth_l1_loss(x, y, reduction="sum"),
        "attention": lambda x, y: F.scaled_dot_product_attention(
            x.reshape(1, 7, 2, 3), y.reshape(1, 7, 2, 3), (x + y).reshape(1, 7, 2, 3)
        ),
        "attention, batch": lambda x, y: F.scaled_dot_product_attention(
            x.reshape(7, 1, 2, 3), y.reshape(7, 1, 2, 3), (x + y).reshape(7, 1, 2, 3)
        ),
        "conv": lambda x, y: F.conv1d(x.reshape(7, 2, 3), numbers(12).reshape(3, 2, 2)),
        "pooling": lambda x, y: F.max_pool1d(x.reshape(7, 2, 3), 2) + F.avg_pool1d(y.reshape(7, 2, 3), 2),
    },
}
