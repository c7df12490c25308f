"""Attention over a sequence in pieces under autograd, round by round.

Forward: while the blocks of one round are computed, the keys and values of the next one are on their way; results of
blocks are merged by their log-sum-exp. Only this rank's own keys, values, results and log-sum-exps are kept. Backward:
keys and values come again, and the gradients of what came go back, where they are added up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from shardwise.autograd.anchors import anchor_gradient, input_anchor, output_anchor
from shardwise.comm.transfer import Moving, TransferPlan, move
from shardwise.comm.transfer.sums import accumulation_dtype
from shardwise.comm.transfer.wire import failing_together
from shardwise.errors import UnsupportedOpError
from shardwise.ops.attention.block_plan import AttentionRound, BlockPlan, BlockTask
from shardwise.ops.attention.dropout import DropoutFactors, Size
from shardwise.ops.attention.kernels import AttentionBlock, kernel_for
from shardwise.ops.attention.merging import MergedResult
from shardwise.ops.attention.visibility import Span
from shardwise.ops.engine.steps import OpSummary, Tensors, agree_on_op, without_autocast


class AttendInPieces(NamedTuple):
    """Attention of this rank's queries over all keys that they see. Every rank of the group takes part."""

    plan: BlockPlan
    group: ProcessGroup
    summary: OpSummary | None  # of the forward
    record: bool
    queries: int  # local tensors of queries
    keys: int  # local tensors of keys, and of values
    widths: tuple[int, int]  # of keys and of values
    dtype: torch.dtype
    device: torch.device
    scale: float
    weights: Size  # samples, heads, queries and keys in all
    dropout: float = 0.0

    @property
    def draws(self) -> bool:
        """Whether a call advances the generator."""
        return self.dropout > 0

    def __call__(self, anchor: torch.Tensor | None, mask: torch.Tensor | None, *tensors: torch.Tensor) -> Tensors:
        """The results of the local queries and, if recorded, an anchor; the tensors are queries, keys and values."""
        factors = None
        if self.dropout:
            wide = accumulation_dtype(self.dtype)
            factors = DropoutFactors.drawn(self.weights, self.dropout, wide, self.device, self.group)
        if not self.record:
            return _Run(self, mask, factors, tensors).forward()[0]
        made = _attended(self, mask, factors, input_anchor(anchor, tensors, self.device), *tensors)
        return [*made[1:], made[0]]


class _Attended(torch.autograd.Function):
    """The results of this rank's queries."""

    @staticmethod
    def forward(
        ctx: Any,
        step: AttendInPieces,
        mask: torch.Tensor | None,
        factors: DropoutFactors | None,
        anchor: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> Any:
        """An anchor, then the results."""
        outs, sums = _Run(step, mask, factors, tensors).forward()
        made = output_anchor(ctx, anchor, tensors)
        ctx.step, ctx.factors = step._replace(summary=None), factors
        ctx.save_for_backward(made, mask, *tensors, *outs, *sums)
        return made, *outs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The gradients of queries, keys and values."""
        step: AttendInPieces = ctx.step
        anchor, mask, *saved = ctx.saved_tensors
        count = step.queries + 2 * step.keys
        outs, sums = saved[count : count + step.queries], saved[count + step.queries :]
        made = _Run(step, mask, ctx.factors, saved[:count]).backward(grads[1:], outs, sums)
        to_anchor = anchor_gradient(ctx, 3, grads[0])
        if torch.is_grad_enabled():
            to_anchor, *made = _differentiated_once(anchor, to_anchor, *made)
        return None, None, None, to_anchor, *made


class _DifferentiatedOnce(torch.autograd.Function):
    """Gradients that are not recorded, though a graph of them is wanted: to differentiate them again is an error.

    Torch's ``once_differentiable`` takes them for constants where the gradients of the results are constants.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *grads: torch.Tensor | None) -> Any:
        """The same gradients, of anchors, too: so every rank comes to the backward, also one without pieces."""
        return tuple(None if grad is None else grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Every rank comes here."""
        raise UnsupportedOpError(
            "attention over a sequence in pieces cannot be differentiated twice, as torch's fused kernels cannot: cut "
            "samples or heads instead of the sequence, or leave out create_graph=True"
        )


_differentiated_once: Callable[..., Any] = _DifferentiatedOnce.apply  # which torch declares without types
_attended: Callable[..., tuple[torch.Tensor, ...]] = _Attended.apply  # which torch declares without types


class _Arrived(NamedTuple):
    """A round whose keys and values are here, for each piece a tensor of samples, heads, positions and width."""

    round: AttentionRound
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]


class _Run:
    """One forward or one backward."""

    def __init__(
        self,
        step: AttendInPieces,
        mask: torch.Tensor | None,
        factors: DropoutFactors | None,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        self._step, self._factors = step, factors
        self._mask = None if mask is None else mask[(None,) * (4 - mask.ndim)]
        self._queries = tensors[: step.queries]
        self._keys = tensors[step.queries : step.queries + step.keys]
        self._values = tensors[step.queries + step.keys :]

    def forward(self) -> tuple[Tensors, Tensors]:
        """The result of each tensor of queries, and its log-sum-exp."""
        merged = [MergedResult(query, self._step.widths[1]) for query in self._queries]
        with failing_together(self._step.group), without_autocast(), torch.no_grad():
            for arrived in self._rounds("attention over a sequence in pieces"):
                for task in arrived.round.tasks:
                    block = self._block(task, arrived)
                    merged[task.query].add(task.in_query, *kernel_for(block).forward(block))
            finished = [one.finish() for one in merged]
        return [out for out, _ in finished], [lse for _, lse in finished]

    def backward(
        self, grads: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], sums: Sequence[torch.Tensor]
    ) -> Tensors:
        """The gradients of queries, keys and values, from those of the results."""
        with failing_together(self._step.group), without_autocast(), torch.no_grad():
            own = _Gradients(self._queries, self._keys, self._values)
            returning: Moving | None = None
            for arrived in self._rounds("the backward of attention over a sequence in pieces"):
                plan = arrived.round.plan
                of_round = own if plan is None else _Gradients((), arrived.keys, arrived.values)
                for task in arrived.round.tasks:
                    block, at = self._block(task, arrived), task.in_query
                    grad, out, lse = (one[task.query][at] for one in (grads, outs, sums))
                    dq, *others = kernel_for(block).backward(block, grad.contiguous(), out, lse)
                    own.queries[task.query][at] += dq
                    of_round.add(task, *others)
                if plan is not None:
                    self._take_back(returning, own)
                    returning = self._send_back(plan, of_round)
            self._take_back(returning, own)
            return [one.to(self._step.dtype) for one in (*own.queries, *own.keys, *own.values)]

    def _block(self, task: BlockTask, arrived: _Arrived) -> AttentionBlock:
        mask, factors = self._mask, None
        times = self._queries[task.query].shape[1] // (task.heads[1] - task.heads[0])
        heads = task.heads[0] * times, task.heads[1] * times
        if self._factors is not None:
            factors = functools.partial(_factors_of, self._factors, task, heads)
        if mask is not None:
            spans = zip(mask.shape, (task.samples, heads, task.queries, task.keys), strict=True)
            mask = mask[tuple(slice(None) if size == 1 else slice(*span) for size, span in spans)]
        query = self._queries[task.query][task.in_query]
        key, value = arrived.keys[task.piece][task.in_piece], arrived.values[task.piece][task.in_piece]
        return AttentionBlock(query, key, value, task.band, mask, self._step.scale, factors)

    # Keys, values and their gradients on their way --------------------------------------------------------------------

    def _rounds(self, verb: str) -> Iterator[_Arrived]:
        """Each round when its keys are here; the next one is on its way by then."""
        own, *others = self._step.plan.rounds
        if not others:
            yield _Arrived(own, self._keys, self._values)
            return
        packed = [_packed(key, value) for key, value in zip(self._keys, self._values, strict=True)]
        moving = self._begin(others[0].plan, packed, verb, is_first=True)
        yield _Arrived(own, self._keys, self._values)
        for number, one in enumerate(others, 1):
            arrived = moving.wait()
            if number < len(others):
                moving = self._begin(others[number].plan, packed, verb)
            keys, values = _unpacked(arrived, self._step.widths)
            yield _Arrived(one, keys, values)

    def _begin(
        self, plan: TransferPlan | None, tensors: Sequence[torch.Tensor], verb: str, *, is_first: bool = False
    ) -> Moving:
        assert plan is not None
        step = self._step
        ready: dict[str, Any] = {}
        if is_first and step.summary is not None:
            ready = {"ready": functools.partial(agree_on_op, step.group, step.summary)}
        return move(plan, tensors, step.group, dtype=step.dtype, verb=verb, **ready)

    def _send_back(self, plan: TransferPlan, gradients: _Gradients) -> Moving:
        both = zip(gradients.keys, gradients.values, strict=True)
        packed = [_packed(key, value).to(self._step.dtype) for key, value in both]
        return self._begin(plan.reverse(), packed, "gradients of keys and values in pieces")

    def _take_back(self, returning: Moving | None, own: _Gradients) -> None:
        if returning is not None:
            keys, values = _unpacked(returning.wait(), self._step.widths)
            for total, more in zip((*own.keys, *own.values), (*keys, *values), strict=True):
                total += more


class _Gradients:
    """Gradients as they are added up."""

    def __init__(
        self, queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> None:
        self.queries, self.keys, self.values = map(_zeros, (queries, keys, values))

    def add(self, task: BlockTask, key: torch.Tensor, value: torch.Tensor) -> None:
        """Take in the gradients of the keys and values of a block."""
        self.keys[task.piece][task.in_piece] += key
        self.values[task.piece][task.in_piece] += value


def _factors_of(factors: DropoutFactors, task: BlockTask, heads: Span, rows: slice) -> torch.Tensor:
    """The factors of some queries of a block."""
    first = task.queries[0]
    return factors.at(task.samples, heads, (first + rows.start, first + rows.stop), task.keys)


def _zeros(tensors: Sequence[torch.Tensor]) -> Tensors:
    return [torch.zeros_like(one, dtype=accumulation_dtype(one.dtype)) for one in tensors]


def _packed(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Keys and values as they travel: samples, positions, heads, width."""
    return torch.cat([key.transpose(1, 2), value.transpose(1, 2)], -1)


def _unpacked(tensors: Sequence[torch.Tensor], widths: tuple[int, int]) -> tuple[Tensors, Tensors]:
    """The keys and the values of what has come."""
    both = [torch.split(one.transpose(1, 2), list(widths), -1) for one in tensors]
    return [key for key, _ in both], [value for _, value in both]
