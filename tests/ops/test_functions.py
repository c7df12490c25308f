"""Custom autograd Functions on sharded tensors: one node, whole gradients, on every rank, as on plain tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cases import ALL, KINDS, PLAIN, SPECS, assert_close, chunks, places
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import PartialTensor, ReplicatedShardingSpec, ShardedTensor, shard_tensor
from shardwise.errors import UnsupportedOpError, ViewWriteError
from shardwise.testing import ranks

X = (PLAIN.double() - 20) / 10


class _Square(Function):
    """Saves its argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = ctx.saved_tensors[0]
        return 2 * x * grad


class _Normalized(Function):
    """Looks at the whole in its backward: a collective, in which every rank takes part; saves its result."""

    @staticmethod
    def forward(x: torch.Tensor, power: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
        return x.pow(power), x.argmax(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.power = inputs[1]
        ctx.save_for_backward(inputs[0], output[0])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        x, y = ctx.saved_tensors
        return grad * y / (1 + y.abs().sum()) + ctx.power * x * grad / grad.norm(), None


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
    twin(layout, lambda x: (_Square.apply(x) + x).sum())
    twin(layout, lambda x: (_Square.apply(_Square.apply(x)) * x).sum())
    twin(layout, lambda x: _Square.apply(x)[:2].sum())
    twin(layout, lambda x: (_Normalized.apply(x, 3)[0] * x).sum())


@ranks(4)
def test_a_result_is_changed_in_place_or_every_rank_says_no() -> None:
    """A rank without shards does as those with them."""
    for layout in KINDS:
        x = shard_tensor(X, ALL[layout]).requires_grad_()
        y = _Square.apply(x)
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
        _Normalized.apply(X, power=3)
    except TypeError:
        pytest.skip("this torch takes no arguments of a Function by name")
    twin("uneven, several per rank", lambda x: (_Normalized.apply(x, power=3)[0] * x).sum())


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
    out = checkpoint(lambda x: twin(shardwise.ReplicatedTensor(x)), mine, use_reentrant=True)
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


TWICE = {**SPECS, "replicated on all ranks": ReplicatedShardingSpec(places(0, 1, 2, 3))}


@pytest.mark.parametrize("layout", TWICE)
@ranks(4)
def test_a_function_is_differentiated_twice(layout: str) -> None:
    """Where its backward is made of ops on its arguments."""
    grads = []
    for x in (shard_tensor(X, TWICE[layout]), X.clone()):
        leaf = x.requires_grad_()
        (first,) = torch.autograd.grad((_Square.apply(leaf * 2) * leaf).sum(), leaf, create_graph=True)
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


class _Exponential(Function):
    """Saves its result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = ctx.saved_tensors[0]
        return grad * y


class _Once(_Square):
    """May be differentiated once."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = ctx.saved_tensors[0]
        return 2 * x * grad


@ranks(2)
def test_what_cannot_be_differentiated_twice_says_so() -> None:
    """The first derivative is right, the second would miss something, and is refused on every rank."""
    x = shard_tensor(X, chunks(0, 0, 1)).requires_grad_()
    cases = [(_Exponential, "saved one of its own", X.exp()), (_Once, "once_differentiable", 2 * X)]
    for kind, why, expected in cases:
        (grad,) = torch.autograd.grad(kind.apply(x).sum(), x)
        assert_close(grad.full_tensor(), expected)
        with pytest.raises(UnsupportedOpError, match=why):
            torch.autograd.grad((kind.apply(x) * x).sum(), x, create_graph=True)


class _Choosy(Function):
    """Wants to know which gradients are missing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x + 1, x * 2

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        assert first is None
        return 2 * second


class _InPlace(Function):
    """Changes its argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


@ranks(3)
def test_contexts_are_as_those_of_plain_tensors() -> None:
    """Missing gradients are None where that is asked for, and what is changed after it was saved is found out."""
    x = shard_tensor(X, chunks(0, 0, 2)).requires_grad_()
    _Choosy.apply(x)[1].sum().backward()
    assert (x.grad == 2).all().item()
    inner = x * 1
    out = _Square.apply(inner)
    assert out.grad_fn.name() == "_SquareBackward"
    assert out.requires_grad
    assert not out.is_leaf
    before = inner.full_tensor().detach()
    with pytest.raises(UnsupportedOpError, match="mark_dirty"):
        _InPlace.apply(inner)
    assert_close(inner.full_tensor().detach(), before)
    with torch.no_grad():
        assert not _Square.apply(x).requires_grad
    assert not _Square.apply(x.detach()).requires_grad


@ranks(2)
def test_an_argument_that_was_changed_after_it_was_saved_is_refused() -> None:
    """As torch refuses it; a result that was changed is refused if it was saved, and is fine if not."""
    for kind, changed in ((_Square, "argument"), (_Exponential, "result")):
        x = shard_tensor(X, chunks(0, 0, 1)).requires_grad_() * 1
        out = kind.apply(x)
        (x if changed == "argument" else out).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    leaf = shard_tensor(X, chunks(0, 0, 1)).requires_grad_()
    out = _Square.apply(leaf)
    out.mul_(3)
    out.sum().backward()
    assert_close(leaf.grad.full_tensor(), 6 * X)


@ranks(2)
def test_a_function_keeps_what_it_saves_and_nothing_else() -> None:
    """While the graph lives; and nothing goes round in circles, so that all is freed with it, without a collector."""
    leaf = shard_tensor(X, chunks(0, 0, 1)).requires_grad_()
    gc.disable()
    for kind, keeps in ((_Square, (True, False)), (_Exponential, (False, True)), (_Negated, (False, False))):
        inner = leaf * 1
        out = kind.apply(inner)
        memory = [weakref.ref(one.local_tensor().untyped_storage()) for one in (inner, out)]
        loss = out.sum()
        del inner, out
        assert tuple(one() is not None for one in memory) == keeps
        loss.backward()
        del loss
        assert [one() for one in memory] == [None, None]
    gc.enable()


class _Negated(Function):
    """Saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return -x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


@ranks(2)
def test_partial_tensors_go_through_a_function() -> None:
    """As the sums that they are, as arguments and as results."""

    class Parts(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return PartialTensor(x.full_tensor())

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return 2 * grad  # what both ranks contribute

    local = X.clone().requires_grad_()
    _Square.apply(PartialTensor(local)).sum().backward()
    assert_close(local.grad, 4 * X)
    x = shard_tensor(X, chunks(1, 0, 1)).requires_grad_()
    (Parts.apply(x) * shard_tensor(X, chunks(0, 0, 1))).sum().backward()
    assert_close(x.grad.full_tensor(), 2 * X)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's tracer does
def test_functions_of_plain_tensors_are_compiled_whole() -> None:
    """`apply` is still what torch's tracer takes it for."""
    x = X.clone().requires_grad_()
    compiled = torch.compile(lambda x: _Square.apply(x).sin().sum(), fullgraph=True, backend="aot_eager")
    compiled(x).backward()
    assert_close(x.grad, 2 * X * X.square().cos())
    doubled = torch.func.grad(lambda x: _Normalized.apply(x)[0].sum())(X)
    assert doubled.shape == X.shape
