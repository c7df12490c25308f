"""One step of torch's optimizer: over the leaves as they lie, or with whole parameters that come for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.process_group import Fields, in_op, or_default
from shardwise.sharded_optim import whole
from shardwise.sharded_optim.roster import Roster
from shardwise.sharded_optim.template import empty_sparse, step_without_hooks

Closure = Callable[[], Any]


def step_in_place(roster: Roster, closure: Closure | None) -> Any:
    """Update every leaf where it lies. Nothing travels, but for what the closure computes."""
    if closure is None:
        complete_gradients(roster)
        return step_without_hooks(roster.inner, None)

    def evaluate() -> Any:
        loss = closure()
        complete_gradients(roster)
        return loss

    return step_without_hooks(roster.inner, evaluate)


def step_whole(roster: Roster, closure: Closure | None) -> Any:
    """Update whole parameters, each on one rank, the others where they lie. The closure is called once, before."""
    group = or_default(roster.group)
    loss = None if closure is None else in_op(group, lambda: (_evaluated(closure), {"verb": "closure"}))
    complete_gradients(roster)
    visitors = whole.with_gradients(roster.visitors, group)

    def work() -> tuple[Any, Fields]:
        return step_without_hooks(roster.inner, None), {"verb": "step"}

    try:
        whole.bring_parameters(visitors)
        whole.bring_gradients(visitors)
        in_op(group, work)
        whole.take_back(visitors)
    finally:
        whole.empty_leaves(visitors)
    return loss


def step_jointly(roster: Roster, closure: Closure | None) -> Any:
    """Update all parameters, whole on every rank, all doing the same; as often as the optimizer calls the closure."""
    group = or_default(roster.group)
    visitors = roster.visitors
    told: list[Exception] = []  # what went wrong in a closure, which every rank knows

    def bring_gradients() -> None:
        complete_gradients(roster)
        whole.bring_gradients(whole.with_gradients(visitors, group))

    def compute() -> tuple[Any, Fields]:
        loss = None if closure is None else _evaluated(closure)
        # Ranks that see another loss would soon do other steps.
        return loss, {"verb": "closure", "loss": float(loss.detach()) if isinstance(loss, torch.Tensor) else loss}

    def evaluate() -> Any:
        whole.take_back(visitors)
        for leaf in (leaf for member in visitors for leaf in member.leaves):
            leaf.grad = None
        try:
            loss = in_op(group, compute)
            bring_gradients()
        except Exception as error:
            told.append(error)
            raise
        return loss

    def work() -> tuple[Any, Fields]:
        try:
            return step_without_hooks(roster.inner, None if closure is None else evaluate), {"verb": "step"}
        except Exception:
            if told:
                return None, {"verb": "step"}
            raise

    try:
        whole.bring_parameters(visitors)
        if closure is None:
            bring_gradients()
        loss = in_op(group, work)
        if told:
            raise told[0]
        whole.take_back(visitors)
    finally:
        whole.empty_leaves(visitors)
    return loss


def _evaluated(closure: Closure) -> Any:
    with torch.enable_grad():
        return closure()


def complete_gradients(roster: Roster) -> None:
    """Zeros for shards that nothing depended on, where others of the same parameter have a gradient."""
    for member in roster.several:
        grads = [leaf.grad for leaf in member.leaves]
        there = next((grad for grad in grads if grad is not None), None)
        if there is None:
            continue
        for leaf, grad in zip(member.leaves, grads, strict=True):
            if grad is None:
                leaf.grad = empty_sparse(leaf) if there.is_sparse else torch.zeros_like(leaf)
