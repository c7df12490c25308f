"""Gradients of leaves that are added up over ranks: in buckets, which travel while the backward goes on.

A replica of a leaf, or a plain leaf that all ranks have, gets the sum of what all of them made of it. One by one, each
would cost a message, and the backward would wait for it. So the node of such a leaf gives autograd nothing: it puts the
gradient into a bucket. A bucket that is full begins to travel at once, the others at the end of the backward, which
then gives the sums to the leaves, as autograd does. All ranks fill the same buckets, in the order of their backwards.

Who looks at a gradient within the backward gets it there: leaves with hooks, and those that others manage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakIdKeyDictionary

from shardwise import settings
from shardwise.layout import Layout
from shardwise.process_group import Fields, Said, step_of_op, talks
from shardwise.tracing import record
from shardwise.transfer.all_reduce import AllReduce, Holding, Team, holding_of

FULL = 25 << 20  # bytes of a bucket that begins to travel


def compared(group: ProcessGroup, fields: Fields) -> Callable[[], object]:
    """Compare these fields with all ranks, as ops do; call the result before anything else is sent."""
    return step_of_op(group, lambda: (None, fields)).finish


def agreed_sum(group: ProcessGroup, of: str, dtype: torch.dtype) -> dict[str, Any]:
    """What ranks say of a sum over replicas; if checks are strict, they begin to compare it."""
    fields = {"verb": "add up the gradients of replicas", "of": of, "dtype": dtype}
    if settings.current().strict and talks(group):
        return {"said": Said(fields), "ready": compared(group, fields)}
    return {"said": Said(fields)}


# Buckets ------------------------------------------------------------------------------------------------------------


@dataclass
class _Entry:
    """What has come of the gradient of one leaf."""

    holding: Holding
    said: str
    leaves: list[torch.Tensor]  # one for each box
    grads: list[torch.Tensor]
    added: bool = False  # whether the gradients are sums of our own, which may be written into

    def add(self, grads: Sequence[torch.Tensor]) -> None:
        """Another use of the same leaf."""
        if self.added:
            for one, other in zip(self.grads, grads, strict=True):
                one += other
        else:
            self.grads = [one + other for one, other in zip(self.grads, grads, strict=True)]
            self.added = True


class _Bucket:
    """Gradients that travel together: all of one group, dtype and type of device."""

    def __init__(self, group: ProcessGroup, dtype: torch.dtype) -> None:
        self.group, self.dtype = group, dtype
        self.entries: dict[int, _Entry] = {}
        self.elements = 0  # the same on every rank, whatever is there
        self.leaves: dict[Team, list[torch.Tensor]] = {}
        self.way: AllReduce | None = None

    def put(self, key: int, entry: _Entry) -> None:
        """One more leaf, or one more use of a leaf that is there."""
        if key in self.entries:
            self.entries[key].add(entry.grads)
        else:
            self.entries[key] = entry
            self.elements += entry.holding.most

    def begin(self) -> None:
        """Let it travel: what the same ranks hold, as one."""
        entries = list(self.entries.values())
        parts: dict[Team, list[torch.Tensor]] = {}
        for entry in entries:
            for team, leaf, grad in zip(entry.holding.teams, entry.leaves, entry.grads, strict=True):
                parts.setdefault(team, []).append(grad.reshape(-1))
                self.leaves.setdefault(team, []).append(leaf)
        holdings = [entry.holding for entry in entries]
        merged = Holding(
            tuple(parts),
            tuple((k,) for k in range(len(parts))),
            self.elements,
            all(one.everywhere for one in holdings),
            False,
            holdings[0].device_types,
        )
        options = agreed_sum(self.group, ", ".join(entry.said for entry in entries), self.dtype)
        self.entries = {}
        flat = [torch.cat(each) for each in parts.values()]
        self.way = AllReduce(merged, flat, self.group, dtype=self.dtype, **options)

    def finish(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The leaves, each with its sum."""
        assert self.way is not None, "a bucket travels before it arrives"
        found = []
        for total, leaves in zip(self.way.wait(), self.leaves.values(), strict=True):
            parts = total.split_with_sizes([leaf.numel() for leaf in leaves])
            found += [(leaf, part.view(leaf.shape)) for leaf, part in zip(leaves, parts, strict=True)]
        return found


class _Backward:
    """The buckets of one backward."""

    def __init__(self) -> None:
        self.open: dict[object, _Bucket] = {}
        self.under_way: list[_Bucket] = []

    def put(self, key: int, entry: _Entry, group: ProcessGroup, dtype: torch.dtype) -> None:
        """Put what has come of a leaf into its bucket, which begins to travel if it is full."""
        kind = (id(group), dtype, entry.holding.device_types)
        bucket = self.open.setdefault(kind, _Bucket(group, dtype))
        bucket.put(key, entry)
        if bucket.elements * dtype.itemsize >= FULL:
            self.begin(self.open.pop(kind))

    def begin(self, bucket: _Bucket) -> None:
        """Let a bucket travel, and those before it go on."""
        for other in self.under_way:
            if other.way is not None:
                other.way.advance()
        bucket.begin()
        self.under_way.append(bucket)

    def finish(self) -> None:
        """Give all leaves their sums, as autograd does: what there is of a gradient is added to."""
        for kind in list(self.open):
            self.begin(self.open.pop(kind))
        under_way, self.under_way = self.under_way, []
        found = [pair for bucket in under_way for pair in bucket.finish()]
        if found:
            with torch.no_grad():
                torch.autograd.backward([leaf for leaf, _ in found], [total for _, total in found])


_running: WeakValueDictionary[int, _Backward] = WeakValueDictionary()  # each kept by the end of its backward


def finish_buckets(task: int) -> None:
    """Give leaves the gradients that a backward has put off. Every rank of their groups calls it."""
    backward = _running.get(task)
    if backward is not None:
        backward.finish()


def put_off(node: Any, layout: Layout, group: ProcessGroup, dtype: torch.dtype, grads: Sequence[torch.Tensor]) -> bool:
    """Put the gradients that a node has for its first inputs, the tensors of a leaf, into a bucket; say if it was done.

    These are the local tensors of a layout, one for each shard; on a rank without any, what stands for them.
    """
    talking = talks(group) or record.is_forecast()
    if torch.is_grad_enabled() or not talking or any(grad.layout != torch.strided for grad in grads):
        return False
    holding = holding_of(layout, dist.get_rank(), group.size())
    accumulators = [_behind_aliases(function) for function, _ in node.next_functions[: max(len(grads), 1)]]
    if holding.twice or not all(_is_put_off(one) for one in accumulators):
        return False
    task = torch._C._current_graph_task_id()
    backward = _running.get(task)
    if backward is None:
        backward = _running[task] = _Backward()
        torch.autograd.Variable._execution_engine.queue_callback(settings.carried(record.carried(backward.finish)))
    tensors = [one.variable for one in accumulators]
    leaves = [tensors[k] for (k,) in holding.numbers]
    entry = _Entry(holding, layout.outline, leaves, [grads[k].detach() for (k,) in holding.numbers])
    backward.put(id(tensors[0]), entry, group, dtype)
    return True


def _behind_aliases(function: Any) -> Any:
    """Where a gradient comes to that passes through nothing but a tensor seen as one of another class."""
    while function is not None and function.name() == "AliasBackward0":
        function = function.next_functions[0][0]
    return function


def _is_put_off(accumulator: Any) -> bool:
    """Whether the gradient of a leaf may come to it at the end of the backward."""
    leaf = getattr(accumulator, "variable", None)
    if leaf is None or leaf._backward_hooks or leaf._post_accumulate_grad_hooks or leaf in _at_once:
        return False
    try:
        return torch._C._will_engine_execute_node(accumulator)
    except RuntimeError:  # in torch.autograd.grad, whose caller gets it
        return False


# Leaves that others manage -------------------------------------------------------------------------------------------

_at_once = WeakIdKeyDictionary()


def is_looked_at(leaf: torch.Tensor) -> None:
    """From now on, give this leaf its gradient within the backward: somebody looks at it there, without a hook."""
    _at_once[leaf] = True
