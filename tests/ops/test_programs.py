"""Cached calls: the second call with a cache key gives its own result, not that of the first."""

from __future__ import annotations

from typing import Any

import torch
from tests.cases import SIZE, assert_close, boxes, chunks
from tests.ops.cached_programs import programs_run
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import shardwise
from shardwise import ShardedTensor
from shardwise.errors import ViewWriteError
from shardwise.ops.engine.call_cache import cache_key
from shardwise.tensor import shard_tensor
from shardwise.tensor.dispatch import registry
from shardwise.testing import ranks


def sharded(seed: int, *, grad: bool = False) -> tuple[torch.Tensor, ShardedTensor]:
    """A plain tensor and the same by rows."""
    plain = torch.randn(SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    tensor = shard_tensor(plain, chunks(0, 0, 1))
    return plain.requires_grad_(grad), tensor.requires_grad_(grad)


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
                assert_close(found.full_tensor(), expected)
                if grad:
                    plain.grad, tensor.grad = None, None
                    expected.square().sum().backward()
                    found.square().sum().backward()
                    assert_close(tensor.grad.full_tensor(), plain.grad)


@ranks(2)
def test_what_is_played_back_and_what_is_not() -> None:
    """Local work is, what moves data, and what draws; what writes goes the long way every time."""
    _, tensor = sharded(0)
    scale, mask = torch.rand(SIZE[1], dtype=torch.float64, requires_grad=True), torch.rand(SIZE) > 0.5
    for function in (
        lambda x: x.t(),
        lambda x: x.sum(1),
        lambda x: x[:, 1:],
        lambda x: x.softmax(1),
        lambda x: x.softmax(0),
        lambda x: x.sum(),
        lambda x: x.sum(0),
        lambda x: x @ x.t(),
        lambda x: x * scale,
        lambda x: x.masked_fill(mask, 0.0),
        lambda x: torch.nn.functional.linear(x, scale.detach().expand(3, -1), scale[:3]),
        lambda x: torch.nn.functional.dropout(x),
        lambda x: torch.nn.functional.rms_norm(x, SIZE[1:], scale),
    ):
        assert programs_run(function, tensor)
    assert not programs_run(lambda x: x.clone().clamp_(0), tensor)


@ranks(2)
def test_what_a_call_has_made_may_be_written_into() -> None:
    """As rms_norm does: values and gradients are those of each call, and its arguments stay as they are."""
    weights = [torch.rand(SIZE[1], dtype=torch.float64, requires_grad=True) for _ in range(3)]
    replicated = shardwise.replicate(weights[2].detach()).requires_grad_()
    for seed in range(3):
        for weight, ours in ((None, None), (weights[0], weights[1]), (weights[2], replicated)):
            plain, tensor = sharded(seed, grad=True)
            if weight is not None:
                weight.grad = ours.grad = None
                weights[1].data.copy_(weights[0].data)
            expected = torch.nn.functional.rms_norm(plain, SIZE[1:], weight)
            found = torch.nn.functional.rms_norm(tensor, SIZE[1:], ours)
            assert_close(found.full_tensor(), expected)
            expected.square().sum().backward()
            found.square().sum().backward()
            assert_close(tensor.grad.full_tensor(), plain.grad)
            assert_close(tensor.full_tensor(), plain)
            if weight is not None:
                grad = ours.grad
                assert_close(grad.full_tensor() if isinstance(grad, ShardedTensor) else grad, weight.grad)


@ranks(2)
def test_attention_with_dropout_is_played_back_and_draws_each_time() -> None:
    """By position: two layouts draw the same, the second call other numbers than the first."""
    plain = torch.randn(2, 4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    calls = []
    for dim in (0, 1):
        torch.manual_seed(1)
        x = shardwise.shard(plain, dim)

        def attend(x: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=True)

        first = attend(x).full_tensor()
        assert programs_run(attend, x)  # which calls it twice
        calls.append((first, attend(x).full_tensor()))
        assert not torch.equal(*calls[-1])
        undropped = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        whole = torch.nn.functional.scaled_dot_product_attention(plain, plain, plain, is_causal=True)
        assert_close(undropped.full_tensor(), whole)
    assert_close(calls[0], calls[1])
    with sdpa_kernel(SDPBackend.MATH):
        torch.manual_seed(1)
        expected = torch.nn.functional.scaled_dot_product_attention(plain, plain, plain, dropout_p=0.5, is_causal=True)
    assert_close(calls[0][0], expected)


@ranks(2)
def test_an_index_is_looked_at_each_time() -> None:
    """A plain index of the same size with another value takes another column."""
    plain, tensor = sharded(0)
    for column in (1, 4, 2):
        assert_close(tensor[:, torch.tensor(column)].full_tensor(), plain[:, column])
        chosen = torch.tensor([column, 0])
        assert_close(tensor[:, chosen].full_tensor(), plain[:, chosen])


@ranks(2)
def test_indices_of_some_dims_are_played_back() -> None:
    """Dims that are not indexed have no tensor in the list: one rank has the index, the other may have nothing."""
    places = ["rank:0/cpu", "rank:1/cpu"]
    by_rows, by_columns = (shardwise.ChunkShardingSpec(dim, places) for dim in (0, 1))
    for seed in range(3):
        plain, rows = sharded(seed)[0], torch.tensor([seed])
        for spec in (by_rows, by_columns):
            tensor, index = shard_tensor(plain, spec), shard_tensor(rows, by_rows)
            for value in (plain[:1] * 2, plain[:1, :1]):
                given = shard_tensor(value, by_rows)
                found = torch.index_put(tensor, (index,), given)
                assert torch.equal(found.full_tensor(), torch.index_put(plain, (rows,), value))
                assert torch.equal(tensor[index].full_tensor(), plain[rows])
                assert torch.equal(tensor[:, index].full_tensor(), plain[:, rows])


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
        assert_close(tensor.softmax(1).full_tensor(), plain.softmax(1))
        tensor.reshard(spec)
    assert_close(tensor.softmax(1).full_tensor(), plain.softmax(1))


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

    shardwise.tensor.dispatch.register_op(torch.Tensor.t)(override)
    try:
        assert tensor.t() == "mine"
    finally:
        del registry.overrides[torch.Tensor.t]
    assert tensor.t().shape == (SIZE[1], SIZE[0])


@ranks(2)
def test_autocast_is_obeyed() -> None:
    """A product that was remembered in float32 is made in bfloat16 under autocast."""
    tensor, weight = sharded(0)[1].float(), torch.randn(SIZE[1], 3)
    products = [tensor @ weight, tensor @ weight]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = tensor @ weight
    assert [one.dtype for one in (*products, low, tensor @ weight)] == [
        torch.float32,
        torch.float32,
        torch.bfloat16,
        torch.float32,
    ]


@ranks(2)
def test_a_tensor_given_twice_is_not_taken_for_two() -> None:
    """After `f(x, x)`, a call `f(x, y)` uses both, and both get their gradients."""
    plain, tensor = sharded(0)
    other_plain, other = sharded(1)
    for function in (
        lambda a, b: torch.cat([a, b], 1),
        lambda a, b: torch.stack([a, b], 2),
        lambda a, b: torch.nn.functional.mse_loss(a, b, reduction="none"),
        lambda a, b: (a.unsqueeze(1) @ b.unsqueeze(2)).squeeze(),
    ):
        for x, y in (((plain, plain), (tensor, tensor)), ((plain, other_plain), (tensor, other))):
            assert_close(function(*y).full_tensor(), function(*x))


@ranks(2)
def test_tensors_of_one_spec_and_other_sizes_keep_their_own() -> None:
    """A result lies as the operand of its size does, not as one that has the same spec."""
    spec = chunks(0, 0, 1)
    small, large = shardwise.ones(spec, 4, 1), shardwise.ones(spec, 4, 6)
    for _ in range(3):
        assert (small + large).shape == (4, 6)
        assert torch.where(small > 0, large, large + 1).full_tensor().shape == (4, 6)


SCALE = [2.0]


def scaled(x: Any) -> Any:
    """A function of a user, which sharded tensors are handed to by torch's protocol."""
    if torch.overrides.has_torch_function((x,)):
        return torch.overrides.handle_torch_function(scaled, (x,), x)
    return x * SCALE[0]


@ranks(2)
def test_functions_that_are_not_torchs_are_called_each_time() -> None:
    """They may look at anything."""
    _, tensor = sharded(0)
    first = scaled(tensor).full_tensor()
    SCALE[0] = 3.0
    assert_close(scaled(tensor).full_tensor(), first * 1.5)


@ranks(2)
def test_tensors_without_data_are_reduced() -> None:
    """On meta there is nothing to send, and the sizes are right."""
    tensor = shardwise.empty(shardwise.ChunkShardingSpec(0, ["rank:0/meta", "rank:1/meta"]), 6, 4)
    for _ in range(2):
        assert tensor.sum().shape == ()
        assert tensor.mean(0).shape == (4,)
        assert tensor.softmax(0).shape == (6, 4)


@ranks(2)
def test_a_call_under_other_settings_of_torch_is_another() -> None:
    """Other kernels of attention are chosen anew, other default dtypes give other results."""
    plain = torch.randn(2, 2, 4, 4, dtype=torch.float64)
    heads, keys, values = (shard_tensor(plain, chunks(0, 0, 1)).requires_grad_() for _ in range(3))
    numbers = shard_tensor(torch.arange(1, 13).reshape(4, 3), chunks(0, 0, 1))
    kinds = []
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION) * 2:
        with sdpa_kernel(backend):
            found = torch.nn.functional.scaled_dot_product_attention(heads, keys, values)
        kinds.append(type(found.local_tensor().grad_fn).__name__)
    assert kinds[0] == kinds[2] != kinds[1] == kinds[3]
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64) * 2:
            torch.set_default_dtype(dtype)
            for function in (torch.sqrt, lambda x: x.logsumexp(1), lambda x: x.logsumexp(0), lambda x: x / 2):
                found, expected = function(numbers), function(numbers.full_tensor())
                assert found.dtype == found.full_tensor().dtype == expected.dtype == dtype
    finally:
        torch.set_default_dtype(before)
    relu = torch.nn.functional.leaky_relu
    usual = cache_key(relu, [heads], {})
    torch.use_deterministic_algorithms(True)
    try:
        assert cache_key(relu, [heads], {}) != usual
    finally:
        torch.use_deterministic_algorithms(False)
    assert cache_key(relu, [heads], {}) == usual
