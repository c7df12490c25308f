"""Products of matrices, and `linear`. Where the contraction is cut, partial sums are added up.

Partial sums of 16 bits travel in 16 bits, are added up in float32, and rounded once: the error of the result is about
1.5 times that of a plain product. Where autograd records nothing, as in the step of an optimizer, accuracy counts for
more than bytes, and partial sums travel in float32; not so for `linear`, which dominates models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from shardwise import settings
from shardwise.comm.transfer.in_graph import is_traced, refuse_in_graph
from shardwise.comm.transfer.sums import NARROW
from shardwise.errors import PropertyError
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.call_cache import IGNORES_VALUES, cached_handler
from shardwise.ops.engine.compute import compute
from shardwise.ops.engine.decomposition import call_decomposed
from shardwise.ops.engine.rule import Along, Labels, Rule, broadcast
from shardwise.ops.engine.table import TABLE
from shardwise.ops.families.reduction import SUM
from shardwise.tensor import ShardedTensor, ShardedTensorBase, from_local
from shardwise.tensor.dispatch import registry
from shardwise.tensor.partial import ReplicatedTensor

aten = torch.ops.aten


def contraction(pattern: str) -> Callable[[Call], Rule | None]:
    """A rule by an einsum pattern; letters that the result lacks are summed over."""

    def rule(call: Call) -> Rule | None:
        labels = Labels()
        operands, out = _labelled(pattern, call.shapes, labels)
        return labels.rule(operands, [out], reduction=SUM)

    return rule


def _labelled(
    pattern: str, shapes: Sequence[Sequence[int]], labels: Labels, whole: str = ""
) -> tuple[list[list[Along | None]], list[Along]]:
    """The dims of operands of these shapes, and of the result, by an einsum pattern; some letters must be whole."""
    inputs, output = pattern.split("->")
    known: dict[str, Along] = {}
    operands: list[list[Along | None]] = []
    for letters, shape in zip(inputs.split(","), shapes, strict=True):
        for letter, size in zip(letters, shape, strict=True):
            if letter not in known:
                known[letter] = labels.new(size, whole=letter in whole)
        operands.append([known[letter] for letter in letters])
    return operands, [known[letter] for letter in output]


def _product_rule(left: Sequence[int], right: Sequence[int], *, transposed: bool, biased: bool = False) -> Rule | None:
    """The rule of ``left @ right``, or of ``left @ right.T``; dims before the last two are broadcast.

    A bias must not be added to each partial sum, so with a bias the contraction is not cut.
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


class _Wide(Call):
    """A product of operands of 16 bits in float32, in which kernels accumulate."""

    def run(self, operands: Sequence[torch.Tensor], **changes: Any) -> torch.Tensor:
        """The product; on a GPU by the kernels for 16 bits."""
        left, right = operands
        alike = left.ndim == right.ndim and left.shape[:-2] == right.shape[:-2]
        if left.is_cuda and alike and left.ndim in (2, 3):
            product = torch.mm if left.ndim == 2 else torch.bmm
            return product(left, right, out_dtype=torch.float32)
        return super().run([left.float(), right.float()], **changes)  # type: ignore[no-any-return] # of a product

    def key(self) -> tuple[Any, ...]:
        """Another key than that of the product in 16 bits."""
        return *super().key(), "wide"


def _is_unrecorded_narrow(operands: Sequence[torch.Tensor]) -> bool:
    """Whether operands are all of 16 bits, and autograd does not record the op."""
    records = torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)
    return not records and all(operand.dtype in NARROW for operand in operands)


def _product(maker: Callable[[Call], Rule | None]) -> Callable[[Call], Any]:
    """A handler of products under the rules that ``maker`` gives."""

    def handler(call: Call) -> Any:
        rule = maker(call)
        if not _is_unrecorded_narrow(call.operands):
            return compute(call, rule)
        result = compute(call, rule, partial=_Wide(call.op, (), call.arguments))
        return result if result is NotImplemented else result.to(call.operands[0].dtype)

    return handler


def _matmul(call: Call) -> Any:
    """The product under one rule, else by torch's decomposition."""
    result = _product(lambda call: _product_rule(*call.shapes, transposed=False))(call)
    return call.op.decompose(*call.operands) if result is NotImplemented else result


def _linear(call: Call) -> Any:
    """A product with the transpose of a matrix, plus a bias."""
    x, weight, bias = call["input"], call["weight"], call["bias"]
    if bias is not None:
        alike = weight.ndim == 2 and bias.shape == weight.shape[:1]
        rule = _product_rule(x.shape, weight.shape, transposed=True, biased=True) if alike else None
        result = compute(call, rule, moves=False)  # in one op, if nothing moves
        if result is not NotImplemented:
            return result
        return _linear(Call(call.op, (), {**call.arguments, "bias": None})) + bias
    result = compute(call, _product_rule(x.shape, weight.shape, transposed=True) if weight.ndim <= 2 else None)
    return torch.matmul(x, weight.t()) if result is NotImplemented else result


def _linear_function(op: Any, args: Any, kwargs: Any) -> Any:
    """`torch.nn.functional.linear`. Under `own_batches`, a plain input is this rank's own batch."""
    names = ("input", "weight", "bias")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if "input" not in given and args:  # moved to the front by name
        given["input"] = args[0]
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    if isinstance(weight, ShardedTensorBase) and weight.ndim == 2:
        if isinstance(x, ReplicatedTensor):
            x = x.as_subclass(torch.Tensor)
        elif settings.current().own_batches and not isinstance(x, ShardedTensorBase):
            x = _all_batches(x, weight)
    return call_decomposed(functional.linear, (x, weight) if bias is None else (x, weight, bias), {})


def _all_batches(batch: torch.Tensor, weight: ShardedTensorBase) -> ShardedTensorBase:
    """The batches of all ranks of the weight's group, concatenated; one sample is a batch of one."""
    if weight._process_group is None:
        raise PropertyError("a sharded weight without a process group cannot be multiplied")
    return from_local(batch if batch.ndim > 1 else batch.reshape(1, -1), process_group=weight._process_group)


def _plus(product: Callable[..., Any], left: str, right: str) -> Callable[[Call], Any]:
    """addmm and the like: ``beta * self + alpha * product``, rounded once if possible.

    A tensor that is multiplied by 0 is ignored, even NaN or infinity; its gradient is 0.
    """

    def handler(call: Call) -> Any:
        alpha, beta, bias = call.arguments.get("alpha", 1), call.arguments.get("beta", 1), call["self"]
        rule = _fused_rule(call) if alpha != 0 and beta != 0 else None
        result = compute(call, rule, moves=False)  # in one op, if nothing moves
        if result is not NotImplemented:
            return result
        elementwise = call.op.overloadpacket is aten.addr  # which ignores self alone
        wide = not elementwise and _is_unrecorded_narrow(call.operands)
        factors = call[left], call[right]
        made = _times(alpha, _wide(product, *factors) if wide else product(*factors), ignores=not elementwise)
        if beta != 0 or (torch.is_grad_enabled() and bias.requires_grad):
            made = made + _times(beta, bias.to(made.dtype), ignores=True)
        return made.to(bias.dtype) if wide else made

    return handler


def _fused_rule(call: Call) -> Rule | None:
    """The rule of ``self + left @ right``; the contraction is not cut, or each partial sum would include self."""
    pattern = _FUSED.get(call.op.overloadpacket)
    if pattern is None:
        return None
    bias, left, right = call.operands
    labels = Labels()
    operands, out = _labelled(pattern, [left.shape, right.shape], labels, whole="k")
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
    result = compute(call, contraction(pattern)(call))
    return product(left, right).float() if result is NotImplemented else result


_CONTRACTIONS: dict[Any, tuple[Any, str]] = {
    torch.mm: (aten.mm.default, "ik,kj->ij"),
    torch.mv: (aten.mv.default, "ik,k->i"),
    torch.bmm: (aten.bmm.default, "bik,bkj->bij"),
}


def _times(factor: Any, x: torch.Tensor, *, ignores: bool) -> torch.Tensor:
    """A multiple of a tensor; with ``ignores``, zeros if the factor is 0, even for NaN and infinity."""
    if factor == 0 and ignores:
        return x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0)
    return x if factor == 1 else x * factor


# One product for each group of rows ---------------------------------------------------------------------------------


class _Grouped(Call):
    """A grouped product, also for dtypes, strides and devices that torch's kernel does not support."""

    def run(self, operands: Sequence[torch.Tensor], **changes: Any) -> Any:
        """Rows up to the first offset times the first matrix, and so on."""
        x, weight, offsets = operands
        if x.is_meta:
            return x.new_empty(x.shape[0], weight.shape[2])
        step = 16 // x.dtype.itemsize
        strides = [*x.stride(), *weight.stride()]
        known = x.dtype == torch.bfloat16 if is_traced() else x.is_cuda and x.dtype != torch.float64
        if known and all(one == 1 or one % step == 0 for one in strides):
            return super().run(operands, **changes)
        refuse_in_graph(f"a grouped product of {x.dtype}", "torch traces those of bfloat16 in rows of whole 16 bytes")
        return _by_group(x, weight, offsets.tolist())


def _by_group(x: Any, weight: Any, ends: Sequence[int]) -> Any:
    """One product for each group; rows after the last group are 0."""
    begins = [0, *ends[:-1]]
    results = [x[begin:end] @ weight[k] for k, (begin, end) in enumerate(zip(begins, ends, strict=True)) if end > begin]
    rest = x.shape[0] - ends[-1]
    if rest or not results:
        results.append(torch.zeros(rest, weight.shape[2], dtype=x.dtype, device=x.device))
    return torch.cat(results)


def _grouped_mm(call: Call) -> Any:
    """Rows times the matrix of their group: under one rule unless groups are cut, else one product for each group.

    In the second case every rank gets the offsets, one number for each group.
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
        result = compute(grouped, rule)
        if result is not NotImplemented:
            return result
    ends = offsets.full_tensor() if isinstance(offsets, ShardedTensor) else offsets
    return _by_group(x, weight, ends.tolist())


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
registry.built_in[functional.linear] = cached_handler(functional.linear, _linear_function)
IGNORES_VALUES.add(functional.linear)
