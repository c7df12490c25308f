"""One step of torch's optimizer: over local shards, or over whole parameters that are gathered for the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from shardwise.comm.agreement import in_op, in_step_sharing
from shardwise.comm.group import Fields, is_member, or_default
from shardwise.comm.transfer import make_plan, move
from shardwise.errors import OptimizerError
from shardwise.nn.optim.member import Member, placeholder
from shardwise.nn.optim.roster import Roster
from shardwise.nn.optim.template import empty_sparse, step_without_hooks
from shardwise.tensor.frame import Frame
from shardwise.tensor.movement import require_movable

Closure = Callable[[], Any]


def step_in_place(roster: Roster, closure: Closure | None) -> Any:
    """Update every local shard. Nothing travels but for what the closure computes."""
    if closure is None:
        complete_gradients(roster)
        return step_without_hooks(roster.inner, None)

    def evaluate() -> Any:
        loss = closure()
        complete_gradients(roster)
        return loss

    return step_without_hooks(roster.inner, evaluate)


def step_whole(roster: Roster, closure: Closure | None) -> Any:
    """Update each gathered parameter whole on one rank, the others in place. The closure is called once, before."""
    group = or_default(roster.group)
    loss = None if closure is None else in_op(group, lambda: (_evaluate(closure), {"verb": "closure"}))
    complete_gradients(roster)
    members = _with_gradients(roster.gathered, group)

    def work() -> tuple[Any, Fields]:
        return step_without_hooks(roster.inner, None), {"verb": "step"}

    try:
        _gather_parameters(members)
        _gather_gradients(members)
        in_op(group, work)
        _scatter_parameters(members)
    finally:
        _free_gathered(members)
    return loss


def step_jointly(roster: Roster, closure: Closure | None) -> Any:
    """Update all parameters whole on every rank, as often as the optimizer calls the closure."""
    group = or_default(roster.group)
    members = roster.gathered
    known: list[Exception] = []  # errors of a closure, which every rank has

    def gather_gradients() -> None:
        complete_gradients(roster)
        _gather_gradients(_with_gradients(members, group))

    def compute() -> tuple[Any, Fields]:
        loss = None if closure is None else _evaluate(closure)
        # Ranks with different losses would soon do different steps.
        return loss, {"verb": "closure", "loss": float(loss.detach()) if isinstance(loss, torch.Tensor) else loss}

    def evaluate() -> Any:
        _scatter_parameters(members)
        for leaf in (leaf for member in members for leaf in member.leaves):
            leaf.grad = None
        try:
            loss = in_op(group, compute)
            gather_gradients()
        except Exception as error:
            known.append(error)
            raise
        return loss

    def work() -> tuple[Any, Fields]:
        try:
            return step_without_hooks(roster.inner, None if closure is None else evaluate), {"verb": "step"}
        except Exception:
            if known:
                return None, {"verb": "step"}
            raise

    try:
        _gather_parameters(members)
        if closure is None:
            gather_gradients()
        loss = in_op(group, work)
        if known:
            raise known[0]
        _scatter_parameters(members)
    finally:
        _free_gathered(members)
    return loss


def _evaluate(closure: Closure) -> Any:
    with torch.enable_grad():
        return closure()


def complete_gradients(roster: Roster) -> None:
    """Give zeros to shards without a gradient whose parameter has a gradient on another shard of this rank."""
    for member in roster.with_several_shards:
        grads = [leaf.grad for leaf in member.leaves]
        first = next((grad for grad in grads if grad is not None), None)
        if first is None:
            continue
        for leaf, grad in zip(member.leaves, grads, strict=True):
            if grad is None:
                leaf.grad = empty_sparse(leaf) if first.is_sparse else torch.zeros_like(leaf)


# Whole parameters for the time of a step -----------------------------------------------------------------------------


def _with_gradients(members: Sequence[Member], group: ProcessGroup) -> list[Member]:
    """The members that have a gradient on any rank. Every rank of the group calls it; a bit for each member travels."""

    def work() -> tuple[None, Fields, list[int]]:
        for member in members:
            require_movable(member.sharded)
            if any(local.grad is not None and local.grad.is_sparse for local in member.sharded._local_tensors()):
                raise OptimizerError(
                    f"the gradient of {member.name!r} is sparse, and its update looks at the whole parameter: "
                    "make it dense, or use an optimizer that updates elements one by one"
                )
        have = [any(local.grad is not None for local in member.sharded._local_tensors()) for member in members]
        fields = {"verb": "step", "parameters": [_layout_fields(member) for member in members]}
        return None, fields, [k for k, has in enumerate(have) if has]

    _, told = in_step_sharing(group, work)
    some = {k for numbers in told.kinds for k in numbers}
    return [member for k, member in enumerate(members) if k in some]


def _layout_fields(member: Member) -> list[str]:
    """The fields of a gathered parameter that must be equal on all ranks."""
    frame, update_frame = _frames(member)
    return [member.name, str(frame.dtype), frame.layout.digest.hex(), update_frame.layout.digest.hex()]


def _gather_parameters(members: Sequence[Member]) -> None:
    for leaf, whole in _gathered(members, [member.sharded._local_tensors() for member in members]):
        leaf.data = whole


def _gather_gradients(members: Sequence[Member]) -> None:
    grads = [
        [torch.zeros_like(local) if local.grad is None else local.grad for local in member.sharded._local_tensors()]
        for member in members
    ]
    for leaf, whole in _gathered(members, grads):
        leaf.grad = whole


def _gathered(
    members: Sequence[Member], tensors: Sequence[Sequence[torch.Tensor]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of a leaf and the whole tensor, of tensors in the parameters' layouts. Every rank of the groups calls it.

    All transfers run at the same time.
    """
    transfers = []
    for member, local in zip(members, tensors, strict=True):
        frame, update_frame = _frames(member)
        group = update_frame.process_group
        if group is not None and is_member(group):
            plan = make_plan(frame.layout, update_frame.layout)
            transfers.append((member.leaves, move(plan, local, group, dtype=update_frame.dtype)))
    return [pair for leaves, moving in transfers for pair in zip(leaves, moving.wait(), strict=True)]


def _scatter_parameters(members: Sequence[Member]) -> None:
    """Write the leaves into the shards, replicas too. Every rank of the groups calls it; all transfers run at once."""
    transfers = []
    for member in members:
        frame, update_frame = _frames(member)
        group = update_frame.process_group
        if group is not None and is_member(group):
            outs = member.sharded._local_tensors()
            plan = make_plan(update_frame.layout, frame.layout)
            transfers.append(move(plan, member.leaves, group, dtype=update_frame.dtype, outs=outs))
    for moving in transfers:
        written = moving.wait()
        if written:
            torch.autograd.graph.increment_version(written)  # written without autograd


def _free_gathered(members: Sequence[Member]) -> None:
    """Free the memory of whole parameters and gradients."""
    for member in members:
        for leaf in member.leaves:
            leaf.grad = None
            leaf.data = placeholder(leaf, leaf.shape, leaf.device)


def _frames(member: Member) -> tuple[Frame, Frame]:
    assert member.frame is not None, "only sharded parameters are gathered"
    assert member.update_frame is not None, "as above"
    return member.frame, member.update_frame
