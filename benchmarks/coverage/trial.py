"""One trial: a case on one system under one sharding, forward or backward, judged by all ranks together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks.coverage.control import Control, Diverged
from benchmarks.coverage.database import Case, can_be_cut, seed
from benchmarks.coverage.systems import System
from benchmarks.coverage.truth import Truth, difference, digest

LONGEST_NOTE = 400


@dataclass(frozen=True)
class Attempt:
    """How a trial went on one rank: `right`, `wrong`, or the type of the error; a note; what all ranks must share."""

    kind: str
    note: str = ""
    digest: str = ""
    gathered: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Judgement:
    """How a trial went: `right`, `refused`, `wrong` or `diverged`; a note; sizes of operands that were gathered."""

    verdict: str
    note: str = ""
    gathered: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Trial:
    """What is tried: a case that is known to work on plain tensors, cut in its first or last dim."""

    system: System
    case: Case
    truth: Truth
    cut: str
    control: Control

    @property
    def differentiable(self) -> bool:
        """Whether there are gradients to compare."""
        return self.truth.gradients is not None

    def forward(self) -> Judgement:
        """Whether the op gives what it gives on plain tensors."""
        return self._judged(functools.partial(self._repeated, self._forward))

    def backward(self) -> Judgement:
        """Whether the gradients of its arguments are those on plain tensors."""
        return self._judged(functools.partial(self._repeated, self._backward))

    def _repeated(self, attempt: Callable[[], Attempt]) -> Attempt:
        """The worst of several calls: a system may do the second in another way than the first."""
        made = [attempt() for _ in range(self.system.calls)]
        return next((one for one in made if one.kind != "right"), made[-1])

    def _forward(self) -> Attempt:
        arguments = self._arguments(grad=False)
        with self.system.scope(arguments):
            outputs = pytree.tree_leaves(self.case.run(arguments))
        wholes = [self.system.whole(out) for out in outputs]
        return self._compared(wholes, self.truth.outputs)

    def _backward(self) -> Attempt:
        gradients = self.truth.gradients
        assert gradients is not None, "only what has a gradient is tried backward"
        arguments = self._arguments(grad=True)
        with self.system.scope(arguments):
            outputs = pytree.tree_leaves(self.case.run(arguments))
            told = difference([_form(out) for out in outputs], [_form(out) for out in self.truth.outputs], values=False)
            if told:
                return Attempt("wrong", f"before backward, {told}")
            self.system.backward(outputs, gradients.weights, self.control)
        leaves = [leaf for leaf, wanted in zip(arguments, self.case.wants_grad, strict=True) if wanted]
        found = self.system.gradients(leaves, self.control)
        expected = [grad for grad in gradients.expected if grad is not None]
        found, expected = (_without(grads, gradients.unwritten) for grads in (found, expected))
        attempt = self._compared(found, expected)
        return Attempt(attempt.kind, attempt.note and f"gradient: {attempt.note}", attempt.digest)

    @functools.cached_property
    def _sharded(self) -> list[Any]:
        """The arguments, every tensor sharded."""
        dims = [0 if self.cut == "first" or not can_be_cut(leaf) else leaf.ndim - 1 for leaf in self.case.arguments]
        pairs = zip(self.case.plain(grad=False), dims, strict=True)
        return [self.system.shard(leaf, dim) if isinstance(leaf, torch.Tensor) else leaf for leaf, dim in pairs]

    def _arguments(self, *, grad: bool) -> list[Any]:
        """The sharded arguments, copied, since an op may write to them."""
        pairs = list(zip(self._sharded, self.case.wants_grad, strict=True))
        seed()
        return [
            self.system.copy(leaf, grad=grad and wanted) if isinstance(leaf, torch.Tensor) else leaf
            for leaf, wanted in pairs
        ]

    def _compared(self, found: list[Any], expected: list[Any]) -> Attempt:
        drawn_alike = self.system.draws_alike and self.case.drawn_alike
        known = (not self.case.random or drawn_alike) and not self.case.uninitialised
        if self.case.unwritten:
            found, expected = (self._without_unwritten(results) for results in (found, expected))
        told = difference(found, expected, values=known)
        if told:
            return Attempt("wrong", told)
        return Attempt("right", digest=digest(found) if self.case.random else "")

    def _without_unwritten(self, results: list[Any]) -> list[Any]:
        """The results, of those that nobody has written only what they look like."""
        unwritten = self.case.unwritten
        return [f"{one.dtype} {tuple(one.shape)}" if k in unwritten else one for k, one in enumerate(results)]

    def _judged(self, attempt: Callable[[], Attempt]) -> Judgement:
        mine = attempted(attempt)
        gathered = () if self.system.gathers is None else tuple(sorted(self.system.gathers.sizes))
        return judge(self.control.exchange("the end", replace(mine, gathered=gathered)))


def attempted(attempt: Callable[[], Attempt]) -> Attempt:
    """What an attempt comes to; an error of the op is an outcome like others."""
    try:
        return attempt()
    except Diverged:
        raise
    except Exception as error:
        return Attempt(type(error).__name__, f"{type(error).__name__}: {error}"[:LONGEST_NOTE])


def judge_those_who(take_part: bool, attempt: Callable[[], Attempt], control: Control) -> Judgement:
    """What the ranks that take part make of their attempts; every rank calls it."""
    told = control.exchange("the end", attempted(attempt) if take_part else None)
    return judge([one for one in told if one is not None])


def judge(attempts: list[Attempt]) -> Judgement:
    """What the ranks together make of their attempts."""
    kinds = {attempt.kind for attempt in attempts}
    gathered = tuple(sorted({size for attempt in attempts for size in attempt.gathered}))
    if len(kinds) > 1 or len({attempt.digest for attempt in attempts}) > 1:
        told = [f"rank {rank}: {one.kind} {one.note[:120]}".rstrip() for rank, one in enumerate(attempts)]
        return Judgement("diverged", "; ".join(told) if len(kinds) > 1 else "ranks have different values", gathered)
    (kind,) = kinds
    return Judgement(kind if kind in ("right", "wrong") else "refused", attempts[0].note, gathered)


def _without(gradients: list[Any], unwritten: list[torch.Tensor]) -> list[Any]:
    """The gradients, with zeros for the elements that plain torch leaves unwritten."""
    pairs = zip(gradients, unwritten, strict=True)
    return [grad.masked_fill(mask, 0) if mask.any() and grad.shape == mask.shape else grad for grad, mask in pairs]


def _form(leaf: Any) -> Any:
    """What has the size and dtype of a tensor, and nothing else."""
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, torch.Tensor) else leaf
