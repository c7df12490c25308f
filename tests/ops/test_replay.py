"""Calls that need no other rank are remembered: the second of a kind gives what it should, not what the first gave."""

from __future__ import annotations

from typing import Any

import torch
from tests.cases import SIZE, boxes, chunks
from torch.overrides import TorchFunctionMode

import shardwise
from shardwise import ShardedTensor, shard_tensor
from shardwise.dispatch import registry
from shardwise.errors import ViewWriteError
from shardwise.ops import replay
from shardwise.testing import ranks


def sharded(seed: int, *, grad: bool = False) -> tuple[torch.Tensor, ShardedTensor]:
    """A plain tensor and the same by rows."""
    plain = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
    tensor = shard_tensor(plain, chunks(0, 0, 1))
    return plain.requires_grad_(grad), tensor.requires_grad_(grad)


def played(function: Any, *args: Any) -> bool:
    """Whether a call is played back, after one of its kind."""
    function(*args)
    seen: list[replay.Tape] = []
    play = replay.Tape.play

    def watched(tape: replay.Tape, *given: Any) -> Any:
        seen.append(tape)
        return play(tape, *given)

    replay.Tape.play = watched
    try:
        function(*args)
    finally:
        replay.Tape.play = play
    return bool(seen)


@ranks(2)
def test_values_numbers_and_gradients_are_those_of_the_call() -> None:
    """Other values, other numbers, with and without a graph: each call gives its own."""
    for seed, (start, stop), scale in ((0, (0, 3), 0.5), (1, (0, 3), 0.5), (2, (1, 4), 2.0)):
        for grad in (False, True, False):
            plain, tensor = sharded(seed, grad=grad)
            for function in (
                lambda x, a=start, b=stop: x[:, a:b],
                lambda x: x.softmax(1),
                lambda x, s=scale: torch.nn.functional.leaky_relu(x, s).sum(1),
                lambda x: x.max(1).values,
                lambda x, s=scale: torch.special.xlogy(x.abs(), s).t(),
            ):
                found, expected = function(tensor), function(plain)
                assert found.requires_grad == grad
                torch.testing.assert_close(found.full_tensor(), expected)
                if grad:
                    plain.grad, tensor.grad = None, None
                    expected.square().sum().backward()
                    found.square().sum().backward()
                    torch.testing.assert_close(tensor.grad.full_tensor(), plain.grad)


@ranks(2)
def test_what_is_played_back_and_what_is_not() -> None:
    """Local work is; what moves data, writes or draws goes the long way every time."""
    _, tensor = sharded(0)
    for function in (lambda x: x.t(), lambda x: x.sum(1), lambda x: x[:, 1:], lambda x: x.softmax(1)):
        assert played(function, tensor)
    others = {
        "moves": lambda x: x.softmax(0),
        "reduces": lambda x: x.sum(),
        "writes": lambda x: x.clone().clamp_(0),
        "draws": lambda x: torch.nn.functional.dropout(x),
    }
    assert [name for name, function in others.items() if played(function, tensor)] == []


@ranks(2)
def test_an_index_is_looked_at_each_time() -> None:
    """A plain index of the same size with another value takes another column."""
    plain, tensor = sharded(0)
    for column in (1, 4, 2):
        torch.testing.assert_close(tensor[:, torch.tensor(column)].full_tensor(), plain[:, column])
        chosen = torch.tensor([column, 0])
        torch.testing.assert_close(tensor[:, chosen].full_tensor(), plain[:, chosen])


@ranks(2)
def test_zeros_of_both_signs_are_told_apart() -> None:
    """Python takes 0.0 and -0.0 for equal."""
    _, tensor = sharded(0)
    for zero in (0.0, -0.0, 0.0):
        found = torch.full_like(tensor, 1.0).copysign(zero).full_tensor()
        assert bool((found.signbit() == torch.tensor(zero).signbit()).all())
        filled = torch.nn.functional.threshold(tensor, 100.0, zero).full_tensor()
        assert bool((filled.signbit() == torch.tensor(zero).signbit()).all())


@ranks(2)
def test_random_ops_draw_each_time() -> None:
    """Two calls of dropout differ."""
    tensor = shardwise.ones(chunks(0, 0, 1), 64, 8)
    masks = [torch.nn.functional.dropout(tensor).full_tensor() for _ in range(3)]
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


@ranks(2)
def test_results_have_the_form_that_torch_gives_them() -> None:
    """Named tuples, tuples and lists, the second time too."""
    plain, tensor = sharded(0)
    for _ in range(2):
        assert type(tensor.max(1)) is type(plain.max(1))
        assert type(tensor.chunk(2, 1)) is type(plain.chunk(2, 1))
        assert tensor.max(1).indices.full_tensor().equal(plain.max(1).indices)


@ranks(2)
def test_views_stay_views_and_copies_refuse_writes() -> None:
    """A slice writes through; a view that had to be moved refuses, the second time too."""
    _, tensor = sharded(0)
    for value in (1.0, 2.0):
        tensor[:, 1:3].fill_(value)
        assert tensor[:, 1:3].full_tensor().eq(value).all()
        moved = tensor.reshape(-1).view(SIZE[1], SIZE[0])
        if moved._copy_of_view:
            try:
                moved.add_(1)
            except ViewWriteError:
                continue
            raise AssertionError("a copy was written into")


@ranks(2)
def test_another_layout_is_another_kind() -> None:
    """After a reshard in place the same call is found out anew."""
    plain, tensor = sharded(0)
    for spec in (chunks(1, 0, 1), boxes(([0, 0], [3, 6], 1), ([3, 0], [4, 6], 0)), chunks(0, 1, 0)):
        torch.testing.assert_close(tensor.softmax(1).full_tensor(), plain.softmax(1))
        tensor.reshard(spec)
    torch.testing.assert_close(tensor.softmax(1).full_tensor(), plain.softmax(1))


class Counting(TorchFunctionMode):
    """Counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """One more."""
        self.seen += 1
        return func(*args, **(kwargs or {}))


@ranks(2)
def test_modes_and_overrides_see_every_call() -> None:
    """A torch function mode sees calls that are remembered; an override registered later holds."""
    _, tensor = sharded(0)
    tensor.t(), tensor.t()
    with Counting() as counting:
        tensor.t(), tensor.t()
    assert counting.seen >= 2

    def override(types: Any, args: Any, kwargs: Any, process_group: Any) -> str:
        return "mine"

    shardwise.custom_sharded_op_impl(torch.Tensor.t)(override)
    try:
        assert tensor.t() == "mine"
    finally:
        del registry.overrides[torch.Tensor.t]
    assert tensor.t().shape == (SIZE[1], SIZE[0])


@ranks(2)
def test_autocast_is_obeyed() -> None:
    """A product that was remembered in float32 is made in bfloat16 under autocast."""
    _, tensor = sharded(0)
    weight = torch.randn(SIZE[1], 3)
    products = [tensor @ weight, tensor @ weight]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = tensor @ weight
    assert [one.dtype for one in (*products, low, tensor @ weight)] == [
        torch.float32,
        torch.float32,
        torch.bfloat16,
        torch.float32,
    ]
