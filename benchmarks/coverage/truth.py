"""What an op gives on plain tensors, and whether a sharded result is the same."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks.coverage.database import Case, seed

TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 4e-2, torch.float64: 1e-7, torch.complex128: 1e-7}
USUAL_TOLERANCE = 1e-4  # of float32 and complex64


@dataclass(frozen=True)
class Gradients:
    """Where a backward starts and what it must give."""

    weights: list[torch.Tensor | None]  # by output; None where nothing flows back
    expected: list[torch.Tensor | None]  # by argument; None where none is asked for
    unwritten: list[torch.Tensor]  # by gradient: a mask of the elements that plain torch leaves unwritten


@dataclass(frozen=True)
class Truth:
    """The result of a case on plain tensors; and its gradients, if it has any."""

    outputs: list[Any]
    gradients: Gradients | None


def truth_of(case: Case) -> Truth:
    """Run a case on plain tensors; raises what the op raises."""
    seed()
    outputs = pytree.tree_leaves(case.run(case.plain(grad=False)))
    try:
        gradients = _gradients(case) if case.differentiable else None
    except Exception:  # an op that writes to its argument, or whose derivative is not known
        gradients = None
    return Truth(outputs, gradients)


def _gradients(case: Case) -> Gradients | None:
    weights, expected = _backward(case)
    if all(weight is None for weight in weights):
        return None
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills the memory of new tensors with NaN
    try:
        _, filled = _backward(case)
    finally:
        torch.use_deterministic_algorithms(False)
    pairs = zip(expected, filled, strict=True)
    unwritten = [_dense(other).isnan() & ~_dense(one).isnan() for one, other in pairs if one is not None]
    return Gradients(weights, expected, unwritten)


def _backward(case: Case) -> tuple[list[torch.Tensor | None], list[Any]]:
    """The gradients of the outputs that a backward starts from, and those of the arguments."""
    arguments = case.plain(grad=True)
    seed()
    outputs, tree = pytree.tree_flatten(case.run(arguments))
    weights = _weights(case, outputs, tree)
    pairs = [(out, weight) for out, weight in zip(outputs, weights, strict=True) if weight is not None]
    if pairs:
        torch.autograd.backward([out for out, _ in pairs], [weight for _, weight in pairs])
    wanted = zip(arguments, case.wants_grad, strict=True)
    grads = [(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad) if grad else None for leaf, grad in wanted]
    return weights, grads


def _weights(case: Case, outputs: list[Any], tree: pytree.TreeSpec) -> list[torch.Tensor | None]:
    """The gradient of a fixed weighted sum of the outputs, or of what the database makes of them, for each output."""
    flows = [isinstance(out, torch.Tensor) and out.requires_grad for out in outputs]
    starts = [out.detach().requires_grad_() if flow else out for out, flow in zip(outputs, flows, strict=True)]
    loss: Any = None
    for out in pytree.tree_leaves(case.outputs_for_loss(pytree.tree_unflatten(starts, tree))):
        if isinstance(out, torch.Tensor) and out.requires_grad:
            real = torch.view_as_real(out) if out.is_complex() else out
            part = (real * waves(real)).sum()
            loss = part if loss is None else loss + part
    leaves = [start for start, flow in zip(starts, flows, strict=True) if flow]
    found = iter(torch.autograd.grad(loss, leaves, allow_unused=True) if leaves and loss is not None else ())
    return [next(found, None) if flow else None for flow in flows]


def waves(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers of its size that differ from element to element, for a gradient to start from."""
    return (torch.arange(tensor.numel(), device=tensor.device) * 0.7 + 0.3).cos().reshape(tensor.shape).to(tensor.dtype)


def difference(found: list[Any], expected: list[Any], *, values: bool) -> str:
    """How the leaves of two results differ, in words; empty when they are the same. Without values, in form only."""
    if len(found) != len(expected):
        return f"{len(found)} results instead of {len(expected)}"
    scale = max(map(_largest, expected), default=1.0) if values else 1.0
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        told = _difference(one, other, values, scale)
        if told:
            return f"result {number}: {told}" if len(found) > 1 else told
    return ""


def _largest(leaf: Any) -> float:
    """The largest finite number in it, or one: rounding errors of sums are in proportion to their largest terms."""
    if not isinstance(leaf, torch.Tensor) or not leaf.numel() or not (leaf.is_floating_point() or leaf.is_complex()):
        return 1.0
    sizes = _dense(leaf).abs() if leaf.is_complex() else _dense(leaf).double().abs()
    return max(1.0, float(sizes.nan_to_num(0.0, 0.0, 0.0).max()))


def _difference(found: Any, expected: Any, values: bool, scale: float) -> str:
    if not isinstance(expected, torch.Tensor):
        if isinstance(found, torch.Tensor) or type(found) is not type(expected):
            return f"a {type(found).__name__} instead of a {type(expected).__name__}"
        same = found == expected or (found != found and expected != expected)  # NaN is like NaN
        if isinstance(expected, float) and not same:
            same = abs(found - expected) <= USUAL_TOLERANCE * (1 + abs(expected))
        return "" if same or not values else f"{found} instead of {expected}"
    if not isinstance(found, torch.Tensor):
        return f"a {type(found).__name__} instead of a tensor"
    if found.shape != expected.shape:
        return f"size {tuple(found.shape)} instead of {tuple(expected.shape)}"
    if found.dtype != expected.dtype:
        return f"{found.dtype} instead of {expected.dtype}"
    if values and found.device.type != expected.device.type:
        return f"on {found.device} instead of {expected.device}"
    return _off(_dense(found), _dense(expected), scale) if values else ""


def _off(found: torch.Tensor, expected: torch.Tensor, scale: float) -> str:
    if found.dtype.is_floating_point or found.dtype.is_complex:
        if found.dtype.itemsize == 1:  # float8, which few ops take
            found, expected = found.float(), expected.float()
        tolerance = TOLERANCE.get(found.dtype, USUAL_TOLERANCE)
        least = tolerance * (1 + scale / 10)
        same = torch.isclose(found, expected, rtol=tolerance, atol=least, equal_nan=True)
    else:
        same = found == expected
    wrong = (~same).nonzero()
    if not len(wrong):
        return ""
    first = tuple(wrong[0].tolist())
    count = f"{len(wrong)} of {same.numel()} elements are wrong"
    return f"{count}, the first {found[first].item():.7g} instead of {expected[first].item():.7g}"


def digest(leaves: list[Any]) -> str:
    """A short text that is the same where all values are."""
    made = hashlib.blake2b(digest_size=8)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            dense = _dense(leaf).detach().resolve_conj().resolve_neg().contiguous()
            made.update(f"{tuple(dense.shape)} {dense.dtype}".encode())
            made.update(dense.reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
        else:
            made.update(repr(leaf).encode())
    return made.hexdigest()


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()
