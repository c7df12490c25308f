"""Hooks on gradients of sharded tensors: once on every rank, with one sharded gradient, as on plain tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cases import ALL, KINDS, PLAIN, assert_close, chunks
from torch import nn
from torch.autograd import graph
from torch.utils.checkpoint import checkpoint

from shardwise import ShardedTensor
from shardwise.errors import UnsupportedOpError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

X = (PLAIN.double() - 20) / 10


def both(layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A sharded leaf and its plain twin."""
    return shard_tensor(X, ALL[layout]).requires_grad_(), X.clone().requires_grad_()


def same(found: Any, expected: Any) -> None:
    """Whether a sharded tensor is as the plain one."""
    assert isinstance(found, ShardedTensor)
    assert_close(found.full_tensor().detach(), expected.detach())


@pytest.mark.parametrize("layout", KINDS)
@ranks(4)
def test_hooks_on_a_leaf(layout: str) -> None:
    """In order, with collectives in them, over two backwards that accumulate; one is removed."""
    notes: list[list[torch.Tensor]] = [[], []]
    leaves = both(layout)
    for leaf, seen in zip(leaves, notes, strict=True):
        leaf.register_hook(lambda grad, seen=seen: seen.append(grad))
        handle = leaf.register_hook(lambda grad: grad / grad.norm())
        leaf.register_hook(lambda grad, seen=seen: seen.append(grad))
        (leaf * leaf).sum().backward()
        handle.remove()
        (leaf.sum() * 2 + leaf.pow(3).sum()).backward()
    same(leaves[0].grad, leaves[1].grad)
    assert len(notes[0]) == len(notes[1]) == 4
    for found, expected in zip(*notes, strict=True):
        same(found, expected)


@pytest.mark.parametrize("layout", KINDS)
@ranks(4)
def test_hooks_on_a_result(layout: str) -> None:
    """In order, with collectives in them; retained is what they leave, and it accumulates."""
    leaves, kept = both(layout), []
    for leaf in leaves:
        inner = leaf * 3
        inner.retain_grad()
        inner.register_hook(lambda grad: grad / grad.norm())
        inner.register_hook(lambda grad: grad + 1)
        loss = (inner * inner).sum() + inner[:2].sum()
        loss.backward(retain_graph=True)
        loss.backward()
        kept.append(inner.grad)
        inner.grad = None
        assert inner.grad is None
    same(leaves[0].grad, leaves[1].grad)
    same(*kept)


@pytest.mark.parametrize("layout", KINDS)
@ranks(4)
def test_hooks_after_accumulation(layout: str) -> None:
    """An optimizer step within the backward, after which no gradient is left."""
    leaves = both(layout)
    for leaf in leaves:
        parameter = nn.Parameter(leaf.detach().clone())
        step = torch.optim.SGD([parameter], lr=0.1)

        def act(one: torch.Tensor, step: Any = step) -> None:
            one.add_(one.grad, alpha=-0.1)  # which a backward allows that is not recorded
            step.step()
            step.zero_grad()

        parameter.register_post_accumulate_grad_hook(act)
        (parameter * parameter).sum().backward()
        assert parameter.grad is None
        with torch.no_grad():
            leaf.copy_(parameter)
    same(*leaves)


@pytest.mark.parametrize("layout", ["chunk dim 0", "uneven, several per rank", "chunk on two ranks", "replicated"])
@ranks(4)
def test_a_hook_for_several_tensors(layout: str) -> None:
    """Leaf and result together, when all have come that come; or the first, which is the result's."""
    notes: list[list[Any]] = [[], []]
    for leaf, seen in zip(both(layout), notes, strict=True):
        inner, unused = leaf * 3, leaf * 4
        tensors = [leaf, inner, unused]
        graph.register_multi_grad_hook(tensors, lambda grads, seen=seen: seen.extend(grads[:2] + grads[2:3] * 0))
        graph.register_multi_grad_hook(tensors, lambda grads: None if grads[2] is None else pytest.fail("unused"))
        graph.register_multi_grad_hook(tensors, lambda grad, seen=seen: seen.append(grad), mode="any")
        with graph.register_multi_grad_hook(tensors, lambda grads: pytest.fail("removed")):
            pass
        for _ in range(2):
            (inner * inner).sum().backward(retain_graph=True)
    assert len(notes[0]) == len(notes[1]) == 6
    notes = [sorted(seen, key=lambda grad: grad.norm().item()) for seen in notes]  # the leaf's come at the end here
    for found, expected in zip(*notes, strict=True):
        same(found, expected)


@pytest.mark.parametrize("layout", ["chunk dim 0", "uneven, several per rank", "chunk on two ranks", "replicated"])
@ranks(4)
def test_gradients_that_are_asked_for_go_through_hooks(layout: str) -> None:
    """`torch.autograd.grad` gives what the hooks leave, and accumulates nothing."""
    found: list[torch.Tensor] = []
    for leaf in both(layout):
        leaf.register_hook(lambda grad: grad * 2)
        found += torch.autograd.grad((leaf * leaf).sum(), leaf)
        assert leaf.grad is None
    same(*found)


@pytest.mark.parametrize("layout", ["chunk dim 0", "all on one rank", "uneven, several per rank"])
@ranks(4)
def test_hooks_in_a_backward_within_another_and_in_one_that_is_recorded(layout: str) -> None:
    """A reentrant checkpoint runs one; what both bring is accumulated. And what hooks do is differentiated."""
    leaves, twice = both(layout), []
    for leaf in leaves:
        leaf.register_hook(lambda grad: grad * 3)
        inner = leaf.detach().clone().requires_grad_()
        (checkpoint(lambda x, leaf=leaf: x * leaf, inner, use_reentrant=True) + leaf).sum().backward()
        other = leaf.detach().clone().requires_grad_()
        result = other * 2
        result.register_hook(lambda grad: grad * grad)
        (first,) = torch.autograd.grad(result.pow(3).sum(), other, create_graph=True)
        first.sum().backward()
        twice.append(other.grad)
    same(leaves[0].grad, leaves[1].grad)
    same(*twice)


@ranks(2)
def test_hooks_follow_a_tensor_to_another_layout() -> None:
    """`reshard` changes the shards, not the tensor."""
    leaf = shard_tensor(X, chunks(0, 0)).requires_grad_()
    leaf.register_hook(lambda grad: grad * 2)
    leaf.reshard(chunks(1, 1, 0))
    leaf.sum().backward()
    same(leaf.grad, torch.full_like(X, 2))


@ranks(2)
def test_hooks_that_cannot_be_are_refused() -> None:
    """Without a gradient, after accumulation of a result, and on a result of which a part is used already."""
    leaf = shard_tensor(X, chunks(0, 0)).requires_grad_()
    with pytest.raises(UnsupportedOpError, match="doesn't require"):
        leaf.detach().register_hook(print)
    with pytest.raises(UnsupportedOpError, match="requires_grad=False"):
        leaf.detach().retain_grad()
    with pytest.raises(UnsupportedOpError, match="non-leaf"):
        (leaf * 1).register_post_accumulate_grad_hook(print)
    for used_again in (True, False):
        inner = leaf * 1
        loss = inner.sum()
        inner.register_hook(lambda grad: grad * 2)
        with pytest.raises(UnsupportedOpError, match="used before"):
            (loss + inner.sum() if used_again else loss).backward()
