"""Products of matrices. A contraction that is cut gives partial sums, which are added up where the result is wanted.

Partial sums of 16 bits are added up in float32, and rounded once. On their way they are of 16 bits: each was rounded,
which makes the error of the result about 1.5 times that of a plain product. Where nothing is recorded, as in the step
of an optimizer, accuracy counts for more than bytes: partial sums then travel in float32. That is not so for `linear`,
of which models are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.ops.engine.call import Call
from shardwise.ops.engine.compute import compute
from shardwise.ops.engine.rule import Along, Labels, Rule, broadcast
from shardwise.ops.engine.table import TABLE
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


NARROW = (torch.float16, torch.bfloat16)


class _Wide(Call):
    """A product of operands of 16 bits that is not rounded to them: in float32, in which kernels accumulate."""

    def run(self, operands: Sequence[torch.Tensor], **changes: Any) -> torch.Tensor:
        """The product; on a GPU by the kernels for 16 bits."""
        left, right = operands
        alike = left.ndim == right.ndim and left.shape[:-2] == right.shape[:-2]
        if left.is_cuda and alike and left.ndim in (2, 3):
            made = torch.mm if left.ndim == 2 else torch.bmm
            return made(left, right, out_dtype=torch.float32)
        return super().run([left.float(), right.float()], **changes)  # type: ignore[no-any-return] # of a product

    def key(self) -> tuple[Any, ...]:
        """Another one than that of the same product, rounded."""
        return *super().key(), "wide"


def _is_unrecorded_narrow(operands: Sequence[torch.Tensor]) -> bool:
    """Whether operands are all of 16 bits, and autograd does not record what is computed of them."""
    records = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
    return not records and all(operand.dtype in NARROW for operand in operands)


def _product(maker: Callable[[Call], Rule | None]) -> Callable[[Call], Any]:
    """A handler for products under the rules which this function makes."""

    def handler(call: Call) -> Any:
        rule = maker(call)
        if rule is None or not _is_unrecorded_narrow(call.operands):
            return NotImplemented if rule is None else compute(call, rule)
        found = compute(call, rule, partial=_Wide(call.op, (), call.arguments))
        return found if found is NotImplemented else found.to(call.operands[0].dtype)

    return handler


def _matmul(call: Call) -> Any:
    """The product that is called, whole; else as torch breaks it down."""
    found = _product(lambda call: _product_rule(*call.shapes, transposed=False))(call)
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


def _plus(product: Callable[..., Any], left: str, right: str) -> Callable[[Call], Any]:
    """addmm and the like: ``beta * self + alpha * product``, rounded once where that can be.

    What is multiplied by 0 may hold NaN or infinity, and is ignored; it still gets its gradient, which is 0.
    """

    def handler(call: Call) -> Any:
        alpha, beta, bias = call.arguments.get("alpha", 1), call.arguments.get("beta", 1), call["self"]
        rule = _fused_rule(call) if alpha != 0 and beta != 0 else None
        found = NotImplemented if rule is None else compute(call, rule, moves=False)  # at once, where all is there
        if found is not NotImplemented:
            return found
        elementwise = call.op.overloadpacket is aten.addr  # which ignores self alone
        wide = not elementwise and _is_unrecorded_narrow(call.operands)
        factors = call[left], call[right]
        made = _times(alpha, _wide(product, *factors) if wide else product(*factors), ignores=not elementwise)
        if beta != 0 or (torch.is_grad_enabled() and bias.requires_grad):
            made = made + _times(beta, bias.to(made.dtype), ignores=True)
        return made.to(bias.dtype) if wide else made

    return handler


def _fused_rule(call: Call) -> Rule | None:
    """Of ``self + left @ right``: self must not be added to each partial sum, so what is summed over is not cut."""
    pattern = _FUSED.get(call.op.overloadpacket)
    if pattern is None:
        return None
    bias, left, right = call.operands
    inputs, output = pattern.split("->")
    labels = Labels()
    known: dict[str, Along] = {}
    operands: list[list[Along | None]] = []
    for letters, shape in zip(inputs.split(","), (left.shape, right.shape), strict=True):
        for letter, size in zip(letters, shape, strict=True):
            if letter not in known:
                known[letter] = labels.new(size, whole=letter == "k")
        operands.append([known[letter] for letter in letters])
    out = [known[letter] for letter in output]
    sizes = [labels.sizes[one.label] for one in out]
    if len(bias.shape) > len(out):
        return None
    behind = len(out) - len(bias.shape)
    added = [None if size == 1 and sizes[behind + k] != 1 else out[behind + k] for k, size in enumerate(bias.shape)]
    return labels.rule([added, *operands], [out])


_FUSED = {aten.addmm: "ik,kj->ij", aten.addmv: "ik,k->i", aten.baddbmm: "bik,bkj->bij"}


def _wide(product: Callable[..., Any], left: torch.Tensor, right: torch.Tensor) -> Any:
    """The product in float32 of operands of 16 bits."""
    if product not in _CONTRACTIONS:
        return product(left, right).float()
    op, pattern = _CONTRACTIONS[product]
    call = _Wide(op, (left, right), {})
    if not call.sharded():
        return call.run(call.operands)
    rule = contraction(pattern)(call)
    found = NotImplemented if rule is None else compute(call, rule)
    return product(left, right).float() if found is NotImplemented else found


_CONTRACTIONS: dict[Any, tuple[Any, str]] = {
    torch.mm: (aten.mm.default, "ik,kj->ij"),
    torch.mv: (aten.mv.default, "ik,k->i"),
    torch.bmm: (aten.bmm.default, "bik,bkj->bij"),
}


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


TABLE.update(
    {
        aten.mm: _product(contraction("ik,kj->ij")),
        aten.bmm: _product(contraction("bik,bkj->bij")),
        aten.mv: _product(contraction("ik,k->i")),
        aten.dot: _product(contraction("k,k->")),
        aten.vdot: _product(contraction("k,k->")),
        aten.matmul: _matmul,
        aten.linear: _linear,
        aten.addmm: _plus(torch.mm, "mat1", "mat2"),
        aten.addmv: _plus(torch.mv, "mat", "vec"),
        aten.baddbmm: _plus(torch.bmm, "batch1", "batch2"),
        aten.addbmm: _plus(lambda left, right: torch.bmm(left, right).sum(0), "batch1", "batch2"),
        aten.addr: _plus(lambda left, right: left.unsqueeze(1) * right, "vec1", "vec2"),
    }
)
if hasattr(aten, "_grouped_mm"):
    TABLE[aten._grouped_mm] = _grouped_mm
