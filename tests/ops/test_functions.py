"""Custom autograd Functions on sharded tensors: one node, whole gradients, on every rank, as on plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cases import ALL, CUTS, KINDS, SPECS, assert_close, chunks, places
from tests.ops.functions import Normalized, Square, X
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import ReplicatedShardingSpec, ShardedTensor
from shardwise.errors import PropertyError, ViewWriteError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks


class _Several(Function):
    """Three results of two tensors, a number between them; one gradient is None, one in another layout."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float, y: torch.Tensor) -> Any:
        ctx.x, ctx.factor = x, factor
        ctx.seen = ctx.needs_input_grad
        return x * factor, y + x, y

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any, third: Any) -> Any:
        assert ctx.needs_input_grad == ctx.seen
        assert [type(grad) for grad in (first, second, third)] == [type(ctx.x)] * 3
        grad = first * ctx.factor + second
        if isinstance(grad, ShardedTensor):
            grad = grad.redistribute(chunks(1, 3, 0))
        return grad, None, second + 2 * third if ctx.needs_input_grad[2] else None


def twin(layout: str, act: Callable[..., torch.Tensor], *more: torch.Tensor) -> None:
    """The gradients of an act's result on a leaf and on what is made of it, as those on plain tensors."""
    found = [shard_tensor(one, ALL[layout]).requires_grad_() for one in (X, *more)]
    expected = [one.clone().requires_grad_() for one in (X, *more)]
    for leaves in (found, expected):
        act(*leaves).backward()
        act(*[leaf * 1.5 for leaf in leaves]).backward()
    for one, plain in zip(found, expected, strict=True):
        assert one.grad._layout == one._layout
        assert_close(one.grad.full_tensor(), plain.grad)
        if ALL[layout] is ALL["replicated"] and one.local_shards():  # every replica has it, not only the first
            assert_close(one.grad.local_tensor(), plain.grad)


@pytest.mark.parametrize("layout", KINDS)
@ranks(4)
def test_the_gradient_goes_through_a_function(layout: str) -> None:
    """Beside other ways from the same tensor, and through the Function twice."""
    twin(layout, lambda x: (Square.apply(x) + x).sum())
    twin(layout, lambda x: (Square.apply(Square.apply(x)) * x).sum())
    twin(layout, lambda x: Square.apply(x)[:2].sum())
    twin(layout, lambda x: (Normalized.apply(x, 3)[0] * x).sum())


@ranks(4)
def test_a_result_is_changed_in_place_or_every_rank_says_no() -> None:
    """A rank without shards does as those with them."""
    for layout in KINDS:
        x = shard_tensor(X, ALL[layout]).requires_grad_()
        y = Square.apply(x)
        if ALL[layout] is ALL["replicated"]:
            with pytest.raises(ViewWriteError, match=r"has replicas.*Change a clone\(\)"):
                y.mul_(2)
            y = y.clone()
        y.mul_(2)
        y.sum().backward()
        assert_close(x.grad.full_tensor(), 4 * X)


@ranks(4)
def test_gradients_are_asked_for_while_nothing_is_recorded() -> None:
    """As in the backward of a Function that computes its forward anew; on ranks without shards too."""
    for layout in KINDS:
        x = shard_tensor(X, ALL[layout]).requires_grad_()
        y = x * x
        with torch.no_grad():
            (grad,) = torch.autograd.grad(y, (x,), y.detach())
        assert_close(grad.full_tensor(), 2 * X**3)


@ranks(4)
def test_arguments_by_name_where_torch_takes_them() -> None:
    """Which older versions do not, whatever the tensors are."""
    try:
        Normalized.apply(X, power=3)
    except TypeError:
        pytest.skip("this torch takes no arguments of a Function by name")
    twin("uneven, several per rank", lambda x: (Normalized.apply(x, power=3)[0] * x).sum())


@pytest.mark.parametrize("layout", KINDS)
@ranks(4)
def test_several_arguments_and_results(layout: str) -> None:
    """Of which some are not used, some have no gradient, and one gradient comes in another layout."""
    twin(layout, lambda x, y: (_Several.apply(x, 3.0, y)[0] + x).sum(), X.flip(0))
    twin(layout, lambda x, y: sum(one.sum() * k for k, one in enumerate(_Several.apply(x, 3.0, y))), X.flip(0))
    twin(layout, lambda x, y: _Several.apply(x, 3.0, y.detach())[1].pow(2).sum() + y.sum(), X.flip(0))
    twin(layout, lambda x, y: _Several.apply(y, 3.0, y)[1].pow(2).sum() + x.sum(), X.flip(0))


@pytest.mark.parametrize("layout", KINDS)
@ranks(4)
def test_a_reentrant_checkpoint_has_the_gradients_of_a_plain_one(layout: str) -> None:
    """Of its argument, also where that is used elsewhere; and of a weight that it finds on its way."""
    twin(layout, lambda x: (checkpoint(lambda t: t * t.sum(), x, use_reentrant=True) + x).sum())
    weight = torch.arange(24.0, dtype=torch.float64).reshape(4, 6) / 10
    found, expected = shard_tensor(weight, chunks(0, 1, 3)).requires_grad_(), weight.clone().requires_grad_()
    for x, linear in ((shard_tensor(X, ALL[layout]), found), (X.clone(), expected)):
        inner = x.requires_grad_() * 2
        out = checkpoint(lambda t, linear=linear: (t @ linear.T).relu(), inner, use_reentrant=True)
        torch.autograd.backward([out.pow(2).sum()])
    assert_close(found.grad.full_tensor(), expected.grad)


@pytest.mark.parametrize("layout", KINDS)
@ranks(4)
def test_a_recomputed_result_may_lie_in_another_layout(layout: str) -> None:
    """A reentrant checkpoint has the gradient of its first result; it is moved to where the second one lies."""

    def act(x: Any) -> Any:
        made = x * x
        moves = isinstance(x, ShardedTensor) and torch.is_grad_enabled()
        return made.redistribute(chunks(1, 3, 1)) if moves else made

    twin(layout, lambda x: (checkpoint(act, x, use_reentrant=True) * x).sum())


@pytest.mark.parametrize("layout", KINDS)
@ranks(4)
def test_a_backward_begins_with_a_gradient_of_any_layout(layout: str) -> None:
    """One that lies elsewhere is moved, a plain one is the same on every rank; of another size, it is refused."""
    x, plain = shard_tensor(X, ALL[layout]).requires_grad_(), X.clone().requires_grad_()
    for given in (shard_tensor(X, chunks(1, 2, 0)), shard_tensor(X, ALL["replicated"]), X):
        for leaf, grad in ((x, given), (plain, X)):
            (found,) = torch.autograd.grad(leaf.pow(3), [leaf], grad)
            (leaf * 2).backward(grad)
            leaf.grad += found
        assert_close(x.grad.full_tensor(), plain.grad)
    grad, expected = shard_tensor(X, chunks(1, 2, 0)).requires_grad_(), X.clone().requires_grad_()
    for leaf, one in ((x, grad), (plain, expected)):
        (found,) = torch.autograd.grad(leaf.pow(3), [leaf], one, create_graph=True)
        found.pow(2).sum().backward()
    assert_close(x.grad.full_tensor(), plain.grad)
    assert_close(grad.grad.full_tensor(), expected.grad)
    for wrong in (X[:1], shard_tensor(X[:1], chunks(0, 0))):
        with pytest.raises(PropertyError, match="expected a gradient of size"):
            (x * 2).backward(wrong)


@ranks(4)
def test_a_reentrant_checkpoint_of_plain_tensors_around_a_sharded_weight() -> None:
    """Its result is sharded though no argument is; the plain argument gets a whole, plain gradient."""
    torch.manual_seed(0)
    plain = nn.Linear(6, 5).double()
    twin = shardwise.shard_module(nn.Linear(6, 5).double(), shardwise.ShardingPlan({"weight": chunks(0, 0, 2, 3)}))
    with torch.no_grad():
        twin.weight.copy_(shard_tensor(plain.weight.data, chunks(0, 0, 2, 3)))
        twin.bias.copy_(plain.bias)
    whole, mine = X.clone().requires_grad_(), X.clone().requires_grad_()
    checkpoint(plain, whole, use_reentrant=True).pow(2).sum().backward()
    out = checkpoint(lambda x: twin(shardwise.tensor.partial.ReplicatedTensor(x)), mine, use_reentrant=True)
    assert isinstance(out, ShardedTensor)
    out.pow(2).sum().backward()
    assert type(mine.grad) is torch.Tensor
    assert_close(mine.grad, whole.grad)
    assert_close(twin.weight.grad.full_tensor(), plain.weight.grad)


def _normalize(module: nn.Module, grads: Any) -> Any:
    return (grads[0] / grads[0].norm(),)


@pytest.mark.parametrize("layout", ["chunk on two ranks", "uneven, several per rank", "replicated"])
@ranks(4)
def test_backward_hooks_of_modules_see_whole_gradients(layout: str) -> None:
    """Before and after, on every rank, and what they return is taken."""
    seen: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    grads = []
    for x in (shard_tensor(X, ALL[layout]), X.clone()):
        is_sharded, layer = isinstance(x, ShardedTensor), nn.Tanh()

        def after(module: nn.Module, given: Any, taken: Any, notes: Any = seen[is_sharded]) -> Any:
            notes += [given[0], taken[0]]
            return (given[0] * 3,)

        layer.register_full_backward_pre_hook(_normalize)
        layer.register_full_backward_hook(after)
        (layer(x.requires_grad_() * 2) * x).sum().backward()
        grads.append(x.grad)
    for found, expected in zip([*seen[True], grads[0]], [*seen[False], grads[1]], strict=True):
        assert_close(found.full_tensor(), expected)


class _Times(Function):
    """Of a sharded and a plain tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad * y, grad * x


@pytest.mark.parametrize("layout", KINDS)
@ranks(4)
def test_a_plain_argument_gets_a_plain_gradient(layout: str) -> None:
    """Whole on every rank, for it is the same on every rank; and a sharded one may be given a plain gradient."""
    x, plain, y, other = shard_tensor(X, ALL[layout]), X.clone(), X.flip(1), X.flip(1)
    for one, two in ((x, y), (plain, other)):
        (_Times.apply(one.requires_grad_(), two.requires_grad_()) * 2 + two).sum().backward()
        (_Times.apply(two.detach(), one * 2)).sum().backward()
    assert type(y.grad) is torch.Tensor
    assert_close(y.grad, other.grad)
    assert_close(x.grad.full_tensor(), plain.grad)


TWICE = {layout: SPECS[layout] for layout in CUTS if layout in SPECS}
TWICE["replicated on all ranks"] = ReplicatedShardingSpec(places(0, 1, 2, 3))


@pytest.mark.parametrize("layout", TWICE)
@ranks(4)
def test_a_function_is_differentiated_twice(layout: str) -> None:
    """Where its backward is made of ops on its arguments."""
    grads = []
    for x in (shard_tensor(X, TWICE[layout]), X.clone()):
        leaf = x.requires_grad_()
        (first,) = torch.autograd.grad((Square.apply(leaf * 2) * leaf).sum(), leaf, create_graph=True)
        (first * first).sum().backward()
        grads.append(leaf.grad)
    assert_close(grads[0].full_tensor(), grads[1])


class _Gathered(_Times):
    """Gives a plain tensor, and sharded gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = _Times.forward(ctx, x, y)
        return found.full_tensor() if isinstance(found, ShardedTensor) else found


@ranks(4)
def test_a_function_gives_a_plain_tensor() -> None:
    """Its arguments get gradients of their own kind: the plain one a plain, the sharded one a sharded."""
    for spec in ALL.values():
        x, plain, y, other = shard_tensor(X, spec), X.clone(), X.flip(1), X.flip(1)
        for one, two in ((x, y), (plain, other)):
            _Gathered.apply(one.requires_grad_(), two.requires_grad_()).pow(2).sum().backward()
        assert type(y.grad) is torch.Tensor
        assert_close(y.grad, other.grad)
        assert_close(x.grad.full_tensor(), plain.grad)
