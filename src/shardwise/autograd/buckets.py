"""Buckets: gradients of leaves that are summed over ranks, packed together and sent while the backward goes on.

Each replica of a leaf, and each copy of a plain leaf, gets the sum of the gradients of all ranks. A message for each
gradient would be slow, and the backward would wait for it. So the node of such a leaf returns no gradient to autograd
but puts it into a bucket. A full bucket is sent at once, the others at the end of the backward; then the sums are
accumulated in the leaves, as autograd does it. All ranks fill the same buckets, in the order of their backwards.

A leaf gets its gradient within the backward if somebody looks at it there: if it has hooks, or others manage it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakIdKeyDictionary

from shardwise import settings
from shardwise.comm.agreement import step_of_op
from shardwise.comm.group import CallFingerprint, Fields, talks
from shardwise.comm.transfer.all_reduce import AllReduce, Holding, Team
from shardwise.torch_private import will_run_node

BUCKET_BYTES = 25 << 20  # a bucket of this size is sent at once


def compared(group: ProcessGroup, fields: Fields) -> Callable[[], object]:
    """Compare these fields with all ranks, as ops do; call the result before anything else is sent."""
    return step_of_op(group, lambda: (None, fields)).finish


def compare_if_strict(group: ProcessGroup, fields: Fields) -> None:
    """The same where checks are strict, of what is sent next; else ranks say it as they send."""
    if settings.current().strict and talks(group):
        compared(group, fields)()


def agreed_sum(group: ProcessGroup, of: str, dtype: torch.dtype) -> dict[str, Any]:
    """What ranks say of a sum over replicas; if checks are strict, they begin to compare it."""
    fields = {"verb": "add up the gradients of replicas", "of": of, "dtype": dtype}
    if settings.current().strict and talks(group):
        return {"said": CallFingerprint(fields), "ready": compared(group, fields)}
    return {"said": CallFingerprint(fields)}


# Buckets ------------------------------------------------------------------------------------------------------------


@dataclass
class LeafGradient:
    """The gradient of one leaf, as far as it has come: a tensor for each box."""

    holding: Holding
    outline: str  # of the layout, for errors
    leaves: list[torch.Tensor]
    grads: list[torch.Tensor]  # the very tensors that came, not views: so autograd gives none of them to another leaf
    is_own: bool = False  # whether the gradients are sums that were made here, and may be written into

    def add(self, grads: Sequence[torch.Tensor]) -> None:
        """The gradient of another use of the same leaf."""
        if self.is_own:
            for one, other in zip(self.grads, grads, strict=True):
                one += other
        else:
            self.grads = [one + other for one, other in zip(self.grads, grads, strict=True)]
            self.is_own = True


class _Bucket:
    """Gradients that are sent together: all of one group, dtype and type of device."""

    def __init__(self, group: ProcessGroup, dtype: torch.dtype) -> None:
        self.group, self.dtype = group, dtype
        self.gradients: dict[int, LeafGradient] = {}
        self.elements = 0  # the same on every rank, whatever the rank holds
        self.leaves: dict[Team, list[torch.Tensor]] = {}
        self.sums: AllReduce | None = None

    def put(self, gradient: LeafGradient, key: int) -> None:
        """One more leaf, or one more use of a leaf that is there."""
        if key in self.gradients:
            self.gradients[key].add(gradient.grads)
        else:
            self.gradients[key] = gradient
            self.elements += gradient.holding.most

    def send(self) -> None:
        """Begin the sums: all that the same ranks hold as one."""
        gradients = list(self.gradients.values())
        parts: dict[Team, list[torch.Tensor]] = {}
        for one in gradients:
            for team, leaf, grad in zip(one.holding.teams, one.leaves, one.grads, strict=True):
                parts.setdefault(team, []).append(grad.reshape(-1))
                self.leaves.setdefault(team, []).append(leaf)
        holdings = [one.holding for one in gradients]
        merged = Holding(
            tuple(parts),
            tuple((k,) for k in range(len(parts))),
            self.elements,
            all(one.everywhere for one in holdings),
            False,
            holdings[0].device_types,
        )
        options = agreed_sum(self.group, ", ".join(one.outline for one in gradients), self.dtype)
        self.gradients = {}
        flat = [torch.cat(each) for each in parts.values()]
        self.sums = AllReduce(merged, flat, self.group, dtype=self.dtype, **options)

    def wait(self) -> dict[Team, list[torch.Tensor]]:
        """The sums of the leaves of each team, in the order of the leaves."""
        assert self.sums is not None, "a bucket is sent before it is awaited"
        found = {}
        for total, (team, leaves) in zip(self.sums.wait(), self.leaves.items(), strict=True):
            parts = total.split_with_sizes([leaf.numel() for leaf in leaves])
            found[team] = [part.view(leaf.shape) for leaf, part in zip(leaves, parts, strict=True)]
        return found


def sum_together(gradients: Sequence[LeafGradient], group: ProcessGroup, dtype: torch.dtype) -> list[torch.Tensor]:
    """The sums of all these gradients over ranks, in order, sent as one bucket. Every rank of the group calls it.

    The leaves need not be leaves of a graph, nor different tensors: their sizes are read.
    """
    bucket = _Bucket(group, dtype)
    for key, gradient in enumerate(gradients):
        bucket.put(gradient, key)
    bucket.send()
    sums = {team: iter(totals) for team, totals in bucket.wait().items()}
    return [next(sums[team]) for gradient in gradients for team in gradient.holding.teams]


class GradientBuckets:
    """The buckets of one backward."""

    def __init__(self) -> None:
        self._open: dict[object, _Bucket] = {}
        self._sent: list[_Bucket] = []
        self._lock = threading.Lock()  # nodes of one backward may run in several threads

    def put(self, gradient: LeafGradient, key: int, group: ProcessGroup, dtype: torch.dtype) -> None:
        """Put the gradient of the leaf with this key into its bucket, which is sent if it is full."""
        with self._lock:
            kind = (id(group), dtype, gradient.holding.device_types)
            bucket = self._open.setdefault(kind, _Bucket(group, dtype))
            bucket.put(gradient, key)
            if bucket.elements * dtype.itemsize >= BUCKET_BYTES:
                self._send(self._open.pop(kind))

    def _send(self, bucket: _Bucket) -> None:
        for other in self._sent:
            if other.sums is not None:
                other.sums.advance()
        bucket.send()
        self._sent.append(bucket)

    def finish(self) -> None:
        """Send the open buckets, and accumulate all sums in their leaves. Every rank of the groups calls it."""
        for kind in list(self._open):
            self._send(self._open.pop(kind))
        sent, self._sent = self._sent, []
        leaves, sums = list[torch.Tensor](), list[torch.Tensor]()
        for bucket in sent:
            for team, totals in bucket.wait().items():
                leaves += bucket.leaves[team]
                sums += totals
        if leaves:
            with torch.no_grad():
                torch.autograd.backward(leaves, sums)


# Leaves that may wait for their gradients ---------------------------------------------------------------------------


def deferrable_leaves(node: Any) -> list[torch.Tensor] | None:
    """The leaves that the inputs of a node are, if all may get their gradients at the end of the backward."""
    accumulators = [_behind_aliases(function) for function, _ in node.next_functions]
    return [one.variable for one in accumulators] if all(_is_deferrable(one) for one in accumulators) else None


def _behind_aliases(function: Any) -> Any:
    """The node behind those of a tensor that is only seen as one of another class."""
    while function is not None and function.name() == "AliasBackward0":
        function = function.next_functions[0][0]
    return function


def _is_deferrable(accumulator: Any) -> bool:
    leaf = getattr(accumulator, "variable", None)
    if leaf is None or leaf._backward_hooks or leaf._post_accumulate_grad_hooks or leaf in _never_deferred:
        return False
    try:
        return bool(will_run_node(accumulator))
    except RuntimeError:  # in torch.autograd.grad, whose caller gets the gradient
        return False


_never_deferred = WeakIdKeyDictionary()


def never_defer(leaf: torch.Tensor) -> None:
    """From now on, give this leaf its gradient within the backward: others look at it there, without a hook."""
    _never_deferred[leaf] = True
