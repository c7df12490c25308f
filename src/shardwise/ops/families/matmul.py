"""Products of matrices. A contraction that is cut gives partial sums, which are added up where the result is wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.ops.engine.call import Call
from shardwise.ops.engine.compute import compute
from shardwise.ops.engine.rule import Along, Labels, Rule, broadcast
from shardwise.ops.engine.table import TABLE, add_rules
from shardwise.ops.families.reduction import SUM
from shardwise.sharded_tensor import ShardedTensorBase

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


def _product_rule(left: Sequence[int], right: Sequence[int], *, transposed: bool, biased: bool = False) -> Rule | None:
    """Of ``left @ right``, whose dims before the last two are broadcast against each other; or of its transpose.

    With a bias, which has the columns: it must not be added to each partial sum, so what is summed over is not cut.
    """
    if not left or not right:
        return None
    labels, (before, other), out = broadcast([left[:-2], right[:-2]])
    rows = [labels.new(left[-2])] if len(left) > 1 else []
    inner = labels.new(left[-1])
    columns = [labels.new(right[-2] if transposed else right[-1])] if len(right) > 1 else []
    last = [*columns, inner] if transposed else [inner, *columns]
    operands = [[*before, *rows, inner], [*other, *last]] + [columns] * biased
    return labels.rule(operands, [[*out, *rows, *columns]], reduction=None if biased else SUM)


def _matmul(call: Call) -> Any:
    """The product that is called, whole; else as torch breaks it down."""
    left, right = call.shapes
    rule = _product_rule(left, right, transposed=False)
    found = NotImplemented if rule is None else compute(call, rule)
    return call.op.decompose(*call.operands) if found is NotImplemented else found


def _linear(call: Call) -> Any:
    """A product with the transpose of a matrix, and a bias."""
    x, weight, bias = call["input"], call["weight"], call["bias"]
    if bias is not None:
        alike = weight.ndim == 2 and bias.shape == weight.shape[:1]
        rule = _product_rule(x.shape, weight.shape, transposed=True, biased=True) if alike else None
        found = NotImplemented if rule is None else compute(call, rule, moves=False)  # at once, where all is there
        return _linear(Call(call.op, (), {**call.arguments, "bias": None})) + bias if found is NotImplemented else found
    rule = _product_rule(x.shape, weight.shape, transposed=True) if weight.ndim <= 2 else None
    found = NotImplemented if rule is None else compute(call, rule)
    return torch.matmul(x, weight.t()) if found is NotImplemented else found


def _plus(product: Callable[[Call], Any]) -> Callable[[Call], Any]:
    """addmm and the like: ``beta * self + alpha * product``.

    What is multiplied by 0 may hold NaN or infinity, and is ignored; it still gets its gradient, which is 0.
    """

    def handler(call: Call) -> Any:
        alpha, beta, bias = call.arguments.get("alpha", 1), call.arguments.get("beta", 1), call["self"]
        elementwise = call.op.overloadpacket is aten.addr  # which ignores self alone
        made = _times(alpha, product(call), ignores=not elementwise)
        if beta == 0 and not (torch.is_grad_enabled() and bias.requires_grad):
            return made
        return made + _times(beta, bias, ignores=True)

    return handler


def _times(factor: Any, x: torch.Tensor, *, ignores: bool) -> torch.Tensor:
    """A multiple of a tensor; with ``ignores``, zeros where the factor is 0, whatever the tensor holds."""
    if factor == 0 and ignores:
        return x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0)
    return x if factor == 1 else x * factor


# One product for each group of rows ---------------------------------------------------------------------------------


class _Grouped(Call):
    """A grouped product that also runs where torch's kernel does not: on other dtypes, strides, and without data."""

    def run(self, operands: Sequence[torch.Tensor], **changes: Any) -> Any:
        """Rows up to the first offset times the first matrix, and so on."""
        x, weight, offsets = operands
        if x.is_meta:
            return x.new_empty(x.shape[0], weight.shape[2])
        step = 16 // x.dtype.itemsize
        strides = [*x.stride(), *weight.stride()]
        if x.is_cuda and x.dtype != torch.float64 and all(one == 1 or one % step == 0 for one in strides):
            return super().run(operands, **changes)
        return _by_group(x, weight, offsets.tolist())


def _by_group(x: Any, weight: Any, ends: Sequence[int]) -> Any:
    """One product after another; rows behind the last group are 0."""
    begins = [0, *ends[:-1]]
    made = [x[begin:end] @ weight[k] for k, (begin, end) in enumerate(zip(begins, ends, strict=True)) if end > begin]
    rest = x.shape[0] - ends[-1]
    if rest or not made:
        made.append(torch.zeros(rest, weight.shape[2], dtype=x.dtype, device=x.device))
    return torch.cat(made)


def _grouped_mm(call: Call) -> Any:
    """Of rows and one matrix for each group: matrices are cut inside; where they lie apart, a product lies with each.

    Then every rank is told the offsets, one number for each group.
    """
    x, weight, offsets = call["self"], call["mat2"], call["offs"]
    if x.ndim == weight.ndim == 3 and offsets is None:
        return torch.bmm(x, weight)
    if x.ndim != 2 or weight.ndim != 3 or call["bias"] is not None or call["out_dtype"] not in (None, x.dtype):
        return NotImplemented
    if not (isinstance(weight, ShardedTensorBase) and weight._layout.cuts(0)):
        grouped = _Grouped(call.op, (x, weight, offsets), {})
        labels = Labels()
        rows, groups = labels.new(x.shape[0], whole=True), labels.new(weight.shape[0], whole=True)
        inner, outer = labels.new(x.shape[1]), labels.new(weight.shape[2])
        rule = labels.rule([[rows, inner], [groups, inner, outer], [groups]], [[rows, outer]], reduction=SUM)
        found = compute(grouped, rule)
        if found is not NotImplemented:
            return found
    return _by_group(x, weight, offsets.tolist())


add_rules(
    {
        aten.mm: contraction("ik,kj->ij"),
        aten.bmm: contraction("bik,bkj->bij"),
        aten.mv: contraction("ik,k->i"),
        aten.dot: contraction("k,k->"),
        aten.vdot: contraction("k,k->"),
    }
)
TABLE.update(
    {
        aten.matmul: _matmul,
        aten.linear: _linear,
        aten.addmm: _plus(lambda call: torch.mm(call["mat1"], call["mat2"])),
        aten.addmv: _plus(lambda call: torch.mv(call["mat"], call["vec"])),
        aten.baddbmm: _plus(lambda call: torch.bmm(call["batch1"], call["batch2"])),
        aten.addbmm: _plus(lambda call: torch.bmm(call["batch1"], call["batch2"]).sum(0)),
        aten.addr: _plus(lambda call: call["vec1"].unsqueeze(1) * call["vec2"]),
    }
)
if hasattr(aten, "_grouped_mm"):
    TABLE[aten._grouped_mm] = _grouped_mm
