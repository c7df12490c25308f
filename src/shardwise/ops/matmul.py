"""Products of matrices. A contraction that is cut gives partial sums, which are added up where the result is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.ops.below import HANDLERS, RULES
from shardwise.ops.call import Call
from shardwise.ops.reduction import SUM
from shardwise.ops.rule import Along, Labels, Rule

aten = torch.ops.aten


def contraction(pattern: str) -> Callable[[Call], Rule | None]:
    """A rule from an einsum pattern; letters that the result does not have are summed over."""
    inputs, output = pattern.split("->")

    def rule(call: Call) -> Rule | None:
        labels = Labels()
        known: dict[str, Along] = {}
        operands = []
        for letters, shape in zip(inputs.split(","), call.shapes, strict=True):
            for letter, size in zip(letters, shape, strict=True):
                if letter not in known:
                    known[letter] = labels.new(size)
            operands.append([known[letter] for letter in letters])
        return labels.rule(operands, [[known[letter] for letter in output]], reduction=SUM)

    return rule


def _plus(product: Callable[[Call], Any]) -> Callable[[Call], Any]:
    """addmm and the like: ``beta * self + alpha * product``."""

    def handler(call: Call) -> Any:
        made = product(call)
        alpha, beta, bias = call.arguments.get("alpha", 1), call.arguments.get("beta", 1), call["self"]
        if alpha != 1:
            made = made * alpha
        if beta == 0:
            return made
        return made + (bias if beta == 1 else bias * beta)

    return handler


RULES.update(
    {
        aten.mm: contraction("ik,kj->ij"),
        aten.bmm: contraction("bik,bkj->bij"),
        aten.mv: contraction("ik,k->i"),
        aten.dot: contraction("k,k->"),
        aten.vdot: contraction("k,k->"),
    }
)
HANDLERS.update(
    {
        aten.addmm: _plus(lambda call: torch.mm(call["mat1"], call["mat2"])),
        aten.addmv: _plus(lambda call: torch.mv(call["mat"], call["vec"])),
        aten.baddbmm: _plus(lambda call: torch.bmm(call["batch1"], call["batch2"])),
        aten.addbmm: _plus(lambda call: torch.bmm(call["batch1"], call["batch2"]).sum(0)),
        aten.addr: _plus(lambda call: call["vec1"].unsqueeze(1) * call["vec2"]),
    }
)
