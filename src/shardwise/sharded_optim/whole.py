"""Whole parameters for the time of a step: to their homes, with their gradients, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from shardwise.errors import OptimizerError
from shardwise.process_group import Fields, in_step_sharing, is_member
from shardwise.sharded_optim.member import Member, hollow
from shardwise.sharded_tensor.frame import Frame
from shardwise.sharded_tensor.movement import require_movable
from shardwise.transfer import Moving, make_plan, move


def with_gradients(members: Sequence[Member], group: ProcessGroup) -> list[Member]:
    """Those that have a gradient, on whatever rank. Every rank of the group calls it; a bit for each member travels."""

    def work() -> tuple[None, Fields, list[int]]:
        for member in members:
            require_movable(member.itself)
            if any(local.grad is not None and local.grad.is_sparse for local in member.itself._local_tensors()):
                raise OptimizerError(
                    f"the gradient of {member.name!r} is sparse, and its update looks at the whole parameter: "
                    "make it dense, or use an optimizer that updates elements one by one"
                )
        have = [any(local.grad is not None for local in member.itself._local_tensors()) for member in members]
        return (
            None,
            {"verb": "step", "parameters": [_about(member) for member in members]},
            [k for k, has in enumerate(have) if has],
        )

    _, found = in_step_sharing(group, work)
    some = {k for numbers in found.kinds for k in numbers}
    return [member for k, member in enumerate(members) if k in some]


def _about(member: Member) -> list[str]:
    """What every rank must say alike of a parameter that comes to its home."""
    frame, home = _frames(member)
    return [member.name, str(frame.dtype), frame.layout.digest.hex(), home.layout.digest.hex()]


def bring_parameters(members: Sequence[Member]) -> None:
    """Fill the leaves with the whole parameters. All go at once; every rank of their groups calls it."""
    arriving = [_begin(member, member.itself._local_tensors()) for member in members]
    for member, moving in zip(members, arriving, strict=True):
        for leaf, whole in zip(member.leaves, moving.wait() if moving else [], strict=True):
            leaf.data = whole


def bring_gradients(members: Sequence[Member]) -> None:
    """Give the leaves, which are whole, their gradients. All go at once; every rank of their groups calls it."""
    arriving = []
    for member in members:
        local = member.itself._local_tensors()
        grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in local]
        arriving.append(_begin(member, grads))
    for member, moving in zip(members, arriving, strict=True):
        for leaf, whole in zip(member.leaves, moving.wait() if moving else [], strict=True):
            leaf.grad = whole


def take_back(members: Sequence[Member]) -> None:
    """Write the leaves into the shards, replicas too. All go at once; every rank of their groups calls it."""
    arriving = []
    for member in members:
        frame, home = _frames(member)
        group = home.process_group
        if group is not None and is_member(group):
            outs = member.itself._local_tensors()
            plan = make_plan(home.layout, frame.layout)
            arriving.append(move(plan, member.leaves, group, dtype=home.dtype, outs=outs))
    for moving in arriving:
        written = moving.wait()
        if written:
            torch.autograd.graph.increment_version(written)  # they were written below autograd


def empty_leaves(members: Sequence[Member]) -> None:
    """Give the memory of whole parameters and gradients back."""
    for member in members:
        for leaf in member.leaves:
            leaf.grad = None
            leaf.data = hollow(leaf, leaf.shape, leaf.device)


def _begin(member: Member, tensors: Sequence[torch.Tensor]) -> Moving | None:
    """Begin to move tensors, in the layout of the parameter, to its home."""
    frame, home = _frames(member)
    group = home.process_group
    if group is None or not is_member(group):
        return None
    return move(make_plan(frame.layout, home.layout), tensors, group, dtype=home.dtype)


def _frames(member: Member) -> tuple[Frame, Frame]:
    assert member.frame is not None, "only sharded parameters have a home"
    assert member.home is not None, "only members with a home are moved"
    return member.frame, member.home
