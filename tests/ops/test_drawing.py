"""Ops that draw: with ranks seeded alike, they give what a plain tensor would give, and generators go on alike."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, SIZE, chunks
from tests.ops.cached_programs import programs_run
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import from_local, settings
from shardwise.errors import RankMismatchError
from shardwise.ops.families import dropout, sampling
from shardwise.tensor import shard_tensor
from shardwise.tensor.random import generators, tiles
from shardwise.testing import ranks

DRAWS: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: functional.dropout(x, 0.3),
    "dropout in place": lambda x: functional.dropout(x.clone(), 0.3, inplace=True),
    "dropout of everything": lambda x: functional.dropout(x, 1.0),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.3, training=True),
    "dropout1d": lambda x: functional.dropout1d(x[:, :, None], 0.5)[:, :, 0],
    "dropout2d": lambda x: functional.dropout2d(x[:, :, None, None], 0.5).flatten(1),
    "feature_alpha_dropout": lambda x: functional.feature_alpha_dropout(x[:, :, None], 0.5, True)[:, :, 0],
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli with p": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.3),
    "bernoulli_ of a tensor": lambda x: torch.zeros_like(x).bernoulli_(x.sigmoid()),
    "exponential_": lambda x: x.clone().exponential_(),
    "normal of a mean": lambda x: torch.normal(x, 2.0),
    "normal of a deviation": lambda x: torch.normal(1.0, x.exp()),
    "normal of both": lambda x: torch.normal(x, x.exp()),
    "poisson": lambda x: torch.poisson(x.exp() * 5),
    "binomial": lambda x: torch.binomial((x.exp() * 10).floor(), x.sigmoid()),
    "gamma": lambda x: torch._standard_gamma(x.exp()),
    "dirichlet": lambda x: torch._sample_dirichlet(x.exp()),
    "multinomial": lambda x: torch.multinomial(x.exp(), 1),
    "multinomial, several": lambda x: torch.multinomial(x.exp(), 3),
    "multinomial, with replacement": lambda x: torch.multinomial(x.exp(), 9, replacement=True),
    "attention": lambda x: functional.scaled_dot_product_attention(*[x.reshape(1, 7, 2, 3)] * 3, dropout_p=0.5),
    "gumbel_softmax": lambda x: functional.gumbel_softmax(x),
}


@pytest.mark.parametrize("name", DRAWS)
@ranks(4)
def test_draws_are_those_of_the_plain_tensor(name: str) -> None:
    """For every layout; in float64, as reductions may be added up in another order. The generators go on alike."""
    values = torch.linspace(-1, 1, 42, dtype=torch.float64).reshape(SIZE)
    torch.manual_seed(3)
    expected, after = DRAWS[name](values), torch.rand(2)
    for spec in ALL:
        for _ in range(2):  # worked out, then as a program
            torch.manual_seed(3)
            found = DRAWS[name](shard_tensor(values, ALL[spec]))
            assert torch.equal(torch.rand(2), after), spec
            assert torch.allclose(found.full_tensor(), expected, rtol=1e-12, atol=1e-12), spec
            assert found.dtype == expected.dtype


@pytest.mark.parametrize("name", ["rrelu", "poisson", "gamma", "dropout", "normal of both"])
@ranks(4)
def test_draws_that_are_not_those_of_a_plain_tensor_are_alike_for_every_layout(name: str) -> None:
    """Of tensors that are larger than is cheap, or where torch draws as the values are."""
    functions = {**DRAWS, "rrelu": lambda x: functional.rrelu(x, training=True)}
    values = torch.linspace(-1, 1, 42, dtype=torch.float64).reshape(SIZE)
    first: Any = None
    with shardwise.gather_budget(0), small_limits():
        for spec in ALL:
            torch.manual_seed(3)
            found = functions[name](shard_tensor(values, ALL[spec])).full_tensor(), torch.rand(2)
            first = found if first is None else first
            assert all(map(torch.equal, found, first)), spec
    torch.manual_seed(3)
    assert not torch.equal(first[0], functions[name](values))


@contextmanager
def small_limits() -> Iterator[None]:
    """Within this context, tensors of eleven elements are too large to be drawn at once, and tiles have eight."""
    before = tiles.TILE
    tiles.TILE = 8
    dropout.SMALL = sampling.SMALL = 10
    try:
        yield
    finally:
        tiles.TILE = before
        dropout.SMALL = sampling.SMALL = generators.SMALL


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
@ranks(4)
def test_recurrent_layers_drop_between_them_as_plain_ones_do(layer: Any) -> None:
    """Whether samples, steps or features are cut."""
    torch.manual_seed(0)
    model, x = layer(5, 7, 3, dropout=0.4, batch_first=True, dtype=torch.float64), torch.rand(6, 4, 5).double()
    torch.manual_seed(1)
    expected = model(x)[0]
    for dim in (0, 1, 2, None):
        torch.manual_seed(1)
        assert torch.allclose(model(shardwise.shard(x, dim))[0].full_tensor(), expected, rtol=1e-12, atol=1e-12)


@ranks(4)
def test_a_backward_has_the_mask_of_its_forward() -> None:
    """Also where a checkpoint computes it again, and gradients are those of the plain tensor."""
    values = torch.linspace(-1, 1, 42, dtype=torch.float64).reshape(SIZE)
    torch.manual_seed(3)
    plain = values.clone().requires_grad_()
    functional.dropout(plain.sin(), 0.4).square().sum().backward()
    for spec in ALL:
        for reentrant in (None, True, False):
            sharded = shard_tensor(values, ALL[spec]).requires_grad_()
            torch.manual_seed(3)

            def work(x: Any) -> Any:
                return functional.dropout(x.sin(), 0.4)

            made = work(sharded) if reentrant is None else checkpoint(work, sharded, use_reentrant=reentrant)
            made.square().sum().backward()
            assert torch.allclose(sharded.grad.full_tensor(), plain.grad, rtol=1e-12, atol=1e-12), (spec, reentrant)


@ranks(4)
def test_dropout_is_a_program_which_draws_anew() -> None:
    """The second call is cached, and has another mask."""
    x = shardwise.ones(0, 8, 64)
    assert programs_run(functional.dropout, x)
    masks = [functional.dropout(x).full_tensor() for _ in range(3)]
    assert not torch.equal(masks[0], masks[1])
    assert len({tuple(row.tolist()) for row in torch.cat(masks)}) == 24


@ranks(4)
def test_nothing_is_drawn_where_nothing_is_dropped() -> None:
    """In evaluation, without a rate, and by fills that are not random."""
    ones = shardwise.ones(0, 4, 64)
    state = torch.get_rng_state()
    heads = shard_tensor(torch.ones(2, 4, 3, 8), chunks(1, 0, 1, 2, 3))
    functional.scaled_dot_product_attention(heads, heads, heads)
    functional.dropout(ones, training=False)
    functional.dropout(ones, p=0.0)
    nn.init.constant_(ones, 2.0)
    assert torch.equal(torch.get_rng_state(), state)


@ranks(3)
def test_dropout_of_plain_and_of_sharded_activations_in_one_model() -> None:
    """A model trains as its plain twin does, step after step, though shards are uneven."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 7), nn.Dropout(), nn.Linear(7, 4)]
    model = nn.Sequential(*layers).double()
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 7), nn.Dropout(), nn.Linear(7, 4)).double()
    shardwise.nn.shard_parameter(model, "2.weight", chunks(0, 0, 1, 2))
    shardwise.nn.shard_parameter(model, "4.weight", chunks(1, 0, 1, 2))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin)]
    batch = torch.rand(5, 6, dtype=torch.float64)
    for step in range(3):
        for given in (batch, from_local(batch.split([3, 0, 2])[dist.get_rank()])):
            for one, x, optimizer in ((model, given, optimizers[0]), (twin, batch, optimizers[1])):
                torch.manual_seed(step)
                optimizer.zero_grad()
                one(x).square().mean().backward()
                optimizer.step()
            for name, parameter in model.named_parameters():
                expected = twin.get_parameter(name)
                whole = parameter.full_tensor() if isinstance(parameter, shardwise.ShardedTensor) else parameter
                assert torch.allclose(whole, expected, rtol=1e-9, atol=1e-12), name


@ranks(4)
def test_where_ranks_draw_their_own_numbers_dropout_is_that_of_each_shard() -> None:
    """As on the drop-in: what this rank's generator gives for a plain tensor of the shard's size."""
    for dim, size in ((0, (2, 6)), (1, (8, 2))):
        x = shardwise.ones(chunks(dim, 0, 1, 2, 3), 8, 6 if dim == 0 else 8)
        torch.manual_seed(dist.get_rank())
        expected, after = functional.dropout(torch.ones(size), 0.3), torch.rand(2)
        torch.manual_seed(dist.get_rank())
        with settings.own_draws():
            found = functional.dropout(x, 0.3)
        assert torch.equal(found.local_tensor(), expected)
        assert torch.equal(torch.rand(2), after)


@ranks(2)
def test_probabilities_that_are_none_are_refused_on_every_rank() -> None:
    """Though only one rank holds them."""
    x = torch.tensor([[0.5, 0.5], [-1.0, 0.5]])
    for function in (torch.bernoulli, lambda p: torch.multinomial(p, 1)):
        with pytest.raises(RuntimeError, match=r"Expected p_in|probability tensor"):
            function(shardwise.shard(x, 0))


@ranks(2)
def test_deviations_below_zero_are_refused_on_every_rank() -> None:
    """Though only one rank holds them."""
    for mean in (0.0, torch.zeros(2, 2), shardwise.zeros(1, 2, 2)):
        with pytest.raises(RuntimeError, match="std >= 0"):
            torch.normal(mean, shardwise.shard(torch.tensor([[0.5, 0.5], [-1.0, 0.5]]), 0))


@ranks(2)
def test_normal_gives_the_dtype_of_the_mean() -> None:
    """And its numbers, also where the deviation is of another dtype."""
    mean, std = torch.zeros(SIZE), torch.linspace(0, 1, 42, dtype=torch.float64).reshape(SIZE)
    torch.manual_seed(3)
    expected = torch.normal(mean, std)
    torch.manual_seed(3)
    found = torch.normal(shardwise.shard(mean, 0), shardwise.shard(std, 1))
    torch.testing.assert_close(found.full_tensor(), expected)  # the dtype, too


@ranks(2)
def test_probabilities_of_few_bits_are_compared_with_all_bits_of_a_draw() -> None:
    """As torch does: rounded to bfloat16, draws would favour some indices."""
    p = torch.full((4,), 0.25, dtype=torch.bfloat16)  # whose sums are exact
    torch.manual_seed(3)
    expected = torch.multinomial(p, 5000, replacement=True)
    torch.manual_seed(3)
    found = torch.multinomial(shardwise.shard(p, None), 5000, replacement=True)
    assert torch.equal(found.full_tensor(), expected)


@ranks(3)
def test_a_sample_without_dims_is_drawn_beyond_the_budget() -> None:
    """One element, which no tile cuts; the generators go on alike."""
    for function in (torch.poisson, torch._standard_gamma):
        torch.manual_seed(3)
        expected = function(torch.tensor(6.0)), torch.rand(2)
        torch.manual_seed(3)
        with shardwise.gather_budget(0):
            found = function(shardwise.ones(0, 6).sum())
        assert torch.equal(found.full_tensor(), expected[0])
        assert torch.equal(torch.rand(2), expected[1])


LYING: dict[str, Callable[[Any], Any]] = {
    "dropout of a transposed tensor": lambda x: functional.dropout(x.t(), 0.4),
    "dropout after an op": lambda x: functional.dropout(x.reshape(7, 2, 3).permute(2, 0, 1).relu(), 0.4),
    "dropout of columns": lambda x: functional.dropout(x[:, ::2], 0.4),
    "dropout with channels last": lambda x: functional.dropout(
        x.reshape(1, 7, 2, 3).contiguous(memory_format=torch.channels_last), 0.4
    ),
    "alpha_dropout": lambda x: functional.alpha_dropout(x.t(), 0.4, training=True),
    "native_dropout": lambda x: torch.native_dropout(x.t(), 0.4, True)[0],
    "rand_like": lambda x: torch.rand_like(x.t()),
    "uniform_": lambda x: x.clone().t().uniform_(),
    "bernoulli": lambda x: torch.bernoulli(x.t().sigmoid()),
}


@pytest.mark.parametrize("name", LYING)
@ranks(4)
def test_a_tensor_that_is_not_contiguous_is_drawn_as_the_plain_one(name: str) -> None:
    """Torch fills such tensors in the order of their memory, or of their elements, as it was built."""
    values = torch.linspace(-1, 1, 42, dtype=torch.float64).reshape(SIZE)
    torch.manual_seed(3)
    plain = LYING[name](values.clone())
    after = torch.rand(3)
    for spec in ALL:
        for _ in range(2):  # worked out, then as a program
            torch.manual_seed(3)
            made = LYING[name](shard_tensor(values, ALL[spec]))
            torch.testing.assert_close(made.full_tensor(), plain, msg=spec)
            assert torch.equal(torch.rand(3), after), spec


@pytest.mark.parametrize("batch_first", [True, False])
@ranks(3)
def test_a_transformer_layer_drops_as_its_plain_twin(batch_first: bool) -> None:
    """Its activations are transposed on their way."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=batch_first).double()
    x = torch.rand(3, 5, 8, dtype=torch.float64)
    torch.manual_seed(5)
    plain = layer(x)
    for plan in (
        {"linear1.*": 0, "linear2.weight": 1},
        {"self_attn.in_proj_weight": 0, "self_attn.out_proj.weight": 1},
    ):
        sharded = shardwise.shard_module(copy.deepcopy(layer), plan)
        for dim in (0, 1):
            torch.manual_seed(5)
            torch.testing.assert_close(sharded(shardwise.shard(x, dim)).full_tensor(), plain)


@ranks(3)
def test_ranks_that_are_seeded_differently_are_told_what_to_do() -> None:
    """Once, after both states."""
    torch.manual_seed(dist.get_rank())
    with pytest.raises(RankMismatchError) as told:
        shardwise.randn(None, 6, 4).full_tensor()
    assert re.search(
        "generator=[0-9a-f]+ on rank 0, .*generator=[0-9a-f]+ on rank 1; .* seed all ranks", str(told.value)
    )
    assert str(told.value).count("torch.manual_seed") == 1
