"""Lists of tensors at once: plain values beside sharded ones are one value, with one gradient."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.cases import ALL, KINDS, SIZE, SPECS, assert_close, assert_holds, chunks
from tests.cases import PLAIN as NUMBERS
from torch import nn

import shardwise
from shardwise import ShardedTensor
from shardwise.errors import PropertyError
from shardwise.nn import shard_parameter
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

PLAIN = NUMBERS.double() / 7


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor, sharded or not."""
    return tensor.detach().full_tensor() if isinstance(tensor, ShardedTensor) else tensor.detach()


@pytest.mark.parametrize("spec", SPECS)
@ranks(4)
def test_plain_values_beside_sharded_ones(spec: str) -> None:
    """Numbers, rows and whole tensors, with and without a gradient; a number in a sharded tensor."""
    for wants in (False, True):
        for value in (torch.tensor(3.0), torch.linspace(1, 2, 6), torch.linspace(1, 2, 42).reshape(7, 6)):
            plain, twin = (value.double().clone().requires_grad_(wants) for _ in range(2))
            leaf, sharded = PLAIN.clone().requires_grad_(), shard_tensor(PLAIN, SPECS[spec]).requires_grad_()
            (expected,), (found,) = torch._foreach_mul([leaf], [plain]), torch._foreach_mul([sharded], [twin])
            assert_holds(found, expected)
            for made in (expected, found):
                (made * PLAIN).sum().backward()
            assert_holds(sharded.grad, leaf.grad)
            if wants:
                assert_close(twin.grad, plain.grad)
    numbers, twins = torch.ones(2).double().requires_grad_(), shard_tensor(torch.ones(2).double(), SPECS["chunk dim 0"])
    twins.requires_grad_()
    torch._foreach_mul([PLAIN], numbers.sum())[0].sum().backward()
    torch._foreach_mul([shard_tensor(PLAIN, SPECS[spec])], twins.sum())[0].sum().backward()
    assert_close(whole(twins.grad), numbers.grad)
    with pytest.raises(RuntimeError, match="broadcast"):
        torch._foreach_mul([shard_tensor(PLAIN, SPECS[spec])], [torch.ones(2).double()])


def values(seed: int) -> torch.Tensor:
    """Between 0.1 and 0.9, where every function has a value."""
    return torch.rand(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 0.8 + 0.1


Columns = list[Any]
BINARY = ("add", "sub", "mul", "div", "pow", "maximum", "minimum", "clamp_min", "clamp_max")
WITH_A_TENSOR = ("add", "mul", "div")
TERNARY = ("addcmul", "addcdiv")


def forms(name: str, others: Columns, thirds: Columns) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """What follows the first list in the calls of a foreach function."""
    numbers = [0.5 + k / 100 for k in range(len(others))]
    if name in BINARY:
        yield (others,), ({"alpha": 2} if name in ("add", "sub") else {})
        yield from (((0.5,), {}), ((numbers,), {}))
        yield from [((torch.tensor(0.5, dtype=torch.float64),), {})] if name in WITH_A_TENSOR else []
    elif name in TERNARY:
        yield from (((others, thirds), {}), ((others, thirds, 0.5), {}), ((others, thirds), {"scalars": numbers}))
        yield (others, thirds, torch.tensor(numbers, dtype=torch.float64)), {}
    elif name == "lerp":
        yield from (((others, thirds), {}), ((others,), {"weight": 0.3}), ((others, numbers), {}))
    elif name in ("norm", "powsum"):
        yield from (((), {}), ((1,), {}), ((3.0,), {"dtype": torch.float64}))
    elif name in ("copy", "mm"):
        yield (others,), {}
    else:
        yield (), {}


RECORDED = ("addcmul", "addcdiv", "mul", "maximum", "lerp", "norm", "mm", "sigmoid")
NOT_IN_TORCH = ("_foreach_addcdiv", "_foreach_maximum_")  # whose gradients torch gets wrong, or has not
NAMES = [name for name in dir(torch) if name.startswith("_foreach_")]


@pytest.mark.parametrize("part", range(3))
@ranks(4)
def test_every_function_on_any_layouts(part: int) -> None:
    """Of each row, and plain tensors beside sharded ones: the values and the gradients of plain tensors."""
    specs = [None, *(ALL[kind] for kind in KINDS)]

    def column(seed: int, turn: int, wants: bool, *, plain: bool = False) -> Columns:
        turned = [None] * len(specs) if plain else [*specs[turn:], *specs[:turn]]
        made = [
            values(seed + k) if one is None else shard_tensor(values(seed + k), one) for k, one in enumerate(turned)
        ]
        return [one.requires_grad_(wants) for one in made]

    kept = {
        turn: [[column(10 * k, turn * k, False, plain=p) for k in range(3)] for p in (True, False)] for turn in (0, 1)
    }
    for name in NAMES[part::3]:
        bare, in_place = name.removeprefix("_foreach_").removesuffix("_"), name.endswith("_")
        unary = len(next(forms(bare, [], []))[0]) == 0
        recorded = bare in RECORDED and name not in NOT_IN_TORCH
        for turn, wants in ((0, False), (1, False), *([(2, True)] if recorded else [])):
            if unary and turn == 1:
                continue
            columns = kept.get(turn) or [
                [column(10 * k, turn * k, wants, plain=plain) for k in range(3)] for plain in (True, False)
            ]
            calls = []
            for plain, (first, second, third) in zip((True, False), columns, strict=True):
                if bare == "mm":
                    second = [one.t() for one in second]
                for rest, named in forms(bare, second, third):
                    if wants and len(rest) == 3 and isinstance(rest[2], torch.Tensor):
                        continue  # torch has no derivative
                    given = [one.clone() for one in first] if in_place else first
                    made = getattr(torch, name)(given, *rest, **named)
                    assert (made is given) if in_place else isinstance(made, tuple)
                    calls.append([plain, given if in_place else made])
            half = len(calls) // 2
            for (_, expected), (_, found) in zip(calls[:half], calls[half:], strict=True):
                for k, (one, other) in enumerate(zip(found, expected, strict=True)):
                    what = f"{name} of row {k}, turned {turn}"
                    assert isinstance(one, ShardedTensor) or specs[k] is None, what
                    assert_holds(one, other, what)
                if wants:
                    for made in (found, expected):
                        sum(one.square().sum() for one in made).backward()
            if wants:
                for found, expected in zip(columns[1], columns[0], strict=True):
                    for k, (one, other) in enumerate(zip(found, expected, strict=True)):
                        assert (one.grad is None) == (other.grad is None)
                        if one.grad is not None:
                            assert_holds(one.grad, other.grad, f"the gradient of {name}, row {k}")


@ranks(4)
def test_a_number_to_the_power_of_each_and_what_is_refused() -> None:
    """On every rank."""
    sharded = [shard_tensor(PLAIN / 7, spec) for spec in ALL.values()]
    for found in torch._foreach_pow(2.0, sharded):
        assert_close(whole(found), 2.0 ** (PLAIN / 7))
    with pytest.raises(PropertyError, match="lists of 12 and 1"):
        torch._foreach_add(sharded, sharded[:1])
    first, other = ([tensor, tensor] for tensor in sharded[:2])
    with pytest.raises(PropertyError, match="sharded as"):
        torch._fused_sgd_(
            first,
            other,
            [],
            weight_decay=0,
            momentum=0,
            lr=0.1,
            dampening=0,
            nesterov=False,
            maximize=False,
            is_first_step=True,
        )


@ranks(4)
def test_adafactor_on_parameters_of_different_layouts() -> None:
    """With foreach: what the plain module gets in three steps."""
    torch.manual_seed(0)
    x = torch.randn(5, 6, dtype=torch.float64)
    models = []
    for sharded in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 7)).double()
        if sharded:
            shard_parameter(model, "0.weight", SPECS["uneven, several per rank"])
            shard_parameter(model, "0.bias", chunks(0, 3, 1))
            shard_parameter(model, "2.weight", chunks(1, 2))
            shard_parameter(model, "4.weight", ALL["replicated"])
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1, foreach=True)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        models.append(model)
    for found, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert_close(whole(found), expected.detach())


@pytest.mark.parametrize("order", [2.0, 1.0, 3.0, 0.0, math.inf, -math.inf])
@ranks(4)
def test_norms_of_any_layouts(order: float) -> None:
    """Those of plain tensors: each element counts once, and what is empty on a rank counts nothing."""
    plain = [torch.rand(7, 6) + 0.5 + k for k in range(len(ALL))]
    sharded = [shard_tensor(one, spec) for one, spec in zip(plain, ALL.values(), strict=True)]
    with pytest.raises(RuntimeError, match="narrowing"):
        torch._foreach_norm(sharded, order, dtype=torch.bfloat16)
    for dtype in (None, torch.float64):
        expected = torch._foreach_norm(plain, order, dtype=dtype)
        for found, norm in zip(torch._foreach_norm(sharded, order, dtype=dtype), expected, strict=True):
            assert found.dtype == norm.dtype
            torch.testing.assert_close(found.full_tensor(), norm)  # rounded in float32 in another order


@ranks(2)
def test_norms_of_short_floats_are_added_up_in_long_ones() -> None:
    """As torch does for a plain tensor, and rounded once."""
    plain = torch.rand(4096).to(torch.bfloat16)
    (norm,) = torch._foreach_norm([shard_tensor(plain, chunks(0, 0, 1))])
    assert norm.dtype == torch.bfloat16
    assert torch.equal(norm.full_tensor(), plain.double().norm().to(torch.bfloat16))


@ranks(2)
def test_norms_of_complex_numbers_and_of_integers() -> None:
    """Of complex numbers those of their absolute values; of integers none, on every rank."""
    plain = torch.randn(6, 4, dtype=torch.complex64)
    for order in (2.0, 1.0, math.inf):
        (found,), (norm,) = (torch._foreach_norm([one], order) for one in (shard_tensor(plain, chunks(0, 1)), plain))
        assert found.dtype == norm.dtype
        torch.testing.assert_close(found.full_tensor(), norm)
    with pytest.raises(RuntimeError, match="floating"):
        torch._foreach_norm([shard_tensor(torch.ones(6, 4, dtype=torch.int64), chunks(0, 1))])


@ranks(3)
def test_gradients_are_clipped_with_one_message() -> None:
    """For all parameters, sharded and plain; so all of them are scaled alike."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
    plan = {"0.*": chunks(0, 0, 1, 2), "1.weight": chunks(1, 2, 0), "2.weight": chunks(0, 1)}
    model = shardwise.shard_module(copy.deepcopy(plain), shardwise.ShardingPlan(plan))
    for one in (plain, model):
        one(torch.ones(2, 6, dtype=torch.float64)).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    with shardwise.trace() as trace:
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert len(trace.events) == 1
    assert_close(total.full_tensor(), expected)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        grad = one.grad
        assert_close(grad.full_tensor() if isinstance(grad, ShardedTensor) else grad, other.grad)
