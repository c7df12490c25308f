"""Random tensors: with ranks seeded alike, a sharded tensor has the numbers of a plain one, however it is sharded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.cases import ALL, SIZE, chunks, holds
from torch import nn

import shardwise
from shardwise import layout_independent, settings
from shardwise.tensor import ShardedTensor, random
from shardwise.tensor.random import Draw, flat, tiles
from shardwise.tensor.random.fill import fill_random
from shardwise.tensor.random.tiles import tile_shape
from shardwise.testing import ranks, run_on_ranks

FILLS: dict[str, Callable[[Any], Any]] = {
    "uniform_": lambda x: x.uniform_(-2, 3),
    "normal_": lambda x: x.normal_(1, 2),
    "exponential_": lambda x: x.exponential_(2.0),
    "log_normal_": lambda x: x.log_normal_(),
    "cauchy_": lambda x: x.cauchy_(),
    "geometric_": lambda x: x.geometric_(0.3),
    "random_": lambda x: x.random_(),
    "random_ to": lambda x: x.random_(9),
    "random_ from": lambda x: x.random_(3, 50),
    "bernoulli_": lambda x: x.bernoulli_(0.4),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 9),
    "randint_like from": lambda x: torch.randint_like(x, low=3, high=9),
    "rand_like of float64": lambda x: torch.rand_like(x, dtype=torch.float64),
    "uniform": nn.init.uniform_,
    "normal": nn.init.normal_,
    "trunc_normal": nn.init.trunc_normal_,
    "trunc_normal of a tail": lambda x: nn.init.trunc_normal_(x, 0, 1, 1.5, 4),
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": lambda x: nn.init.kaiming_uniform_(x, a=math.sqrt(5)),
    "kaiming_normal": lambda x: nn.init.kaiming_normal_(x, mode="fan_out"),
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda x: nn.init.sparse_(x, 0.3),
    "dirac": lambda x: nn.init.dirac_(x.view(7, 6, 1)).view(SIZE),
    "eye": nn.init.eye_,
}


def seeded(work: Callable[[], Any]) -> tuple[Any, torch.Tensor]:
    """What the work gives after a seed, and what is drawn next."""
    torch.manual_seed(5)
    return work(), torch.rand(3)


@pytest.mark.parametrize("name", FILLS)
@ranks(4)
def test_a_sharded_tensor_is_filled_as_a_plain_one(name: str) -> None:
    """The same bits for every layout, and the generators go on as after the plain draw, on every rank."""
    expected, after = seeded(lambda: FILLS[name](torch.ones(SIZE)))
    for spec in ALL:
        found, then = seeded(lambda: FILLS[name](shardwise.ones(ALL[spec], *SIZE)))  # noqa: B023 # called here
        assert holds(found, expected), spec
        assert torch.equal(then, after), spec


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int64])
@ranks(4)
def test_factories_have_the_numbers_of_plain_ones(dtype: torch.dtype) -> None:
    """For every layout and dtype, from torch's generator or from one that is given."""
    if dtype.is_floating_point:
        expected, after = seeded(lambda: torch.rand(SIZE, dtype=dtype))
        for spec in ALL.values():
            found, then = seeded(lambda: shardwise.rand(spec, *SIZE, dtype=dtype))  # noqa: B023 # called here
            assert holds(found, expected)
            assert torch.equal(then, after)
    if dtype is not torch.int64:
        source = torch.Generator().manual_seed(1)
        expected = torch.randn(SIZE, dtype=dtype, generator=source)
        after = torch.rand(2, generator=source)
        for spec in ALL.values():
            source.manual_seed(1)
            assert holds(shardwise.randn(spec, *SIZE, dtype=dtype, generator=source), expected)
            assert torch.equal(torch.rand(2, generator=source), after)
    if dtype is torch.int64:
        expected, _ = seeded(lambda: torch.zeros(SIZE, dtype=dtype).random_(2**40))
        for spec in ALL.values():
            found, _ = seeded(lambda: shardwise.zeros(spec, *SIZE, dtype=dtype).random_(2**40))  # noqa: B023 # here
            assert holds(found, expected)


def drawn_large(how: str, spec: Any) -> torch.Tensor:
    """A tensor that is too large to be drawn at once."""
    size = (13, 11, 5)
    flat.CHUNK, flat.BLOCK["cpu"], tiles.TILE = 32, 48, 16
    torch.manual_seed(2)
    most = {"chunks": 10**6, "tiles": 10}[how]
    made = shardwise.empty(spec, *size)
    fill_random(made._frame, made._local_tensors(), Draw(torch.Tensor.normal_, (0.0, 1.0), most=most))
    flat.CHUNK, flat.BLOCK["cpu"], tiles.TILE = 1 << 18, 1 << 22, 1 << 16
    return torch.cat([made.full_tensor().flatten(), torch.rand(2)])


@pytest.mark.parametrize("how", ["chunks", "tiles"])
def test_large_tensors_are_the_same_for_every_layout_and_every_number_of_ranks(how: str) -> None:
    """In chunks they have a plain tensor's numbers; in tiles others, with the same statistics."""
    first = run_on_ranks(1, drawn_large, how, 0)[0]
    for world in (2, 3, 4):
        for spec in (0, 1, 2, None):
            assert all(torch.equal(one, first) for one in run_on_ranks(world, drawn_large, how, spec))
    torch.manual_seed(2)
    plain = torch.cat([torch.randn(13 * 11 * 5), torch.rand(2)])
    assert torch.equal(first, plain) is (how == "chunks")
    assert first[:-2].unique().numel() == first.numel() - 2  # no shard repeats another, nor a tile another
    assert abs(first[:-2].mean().item()) < 5 / math.sqrt(first.numel())  # five standard errors
    assert abs(first[:-2].square().mean().item() - 1) < 5 * math.sqrt(2 / first.numel())


@ranks(4)
def test_ranks_that_are_seeded_alike_do_not_repeat_each_other() -> None:
    """No two rows are equal, and the bounds are those of the whole weight."""
    torch.manual_seed(0)
    rows = shardwise.randn(0, 8, 4).full_tensor()
    assert len({tuple(row.tolist()) for row in rows}) == 8
    weight = nn.init.kaiming_uniform_(shardwise.empty(1, 64, 64), nonlinearity="linear").full_tensor()
    bound = math.sqrt(3 / 64)
    assert 0.9 * bound < weight.abs().max() <= bound


@ranks(4)
def test_a_model_that_is_initialised_after_it_is_sharded_is_the_plain_one() -> None:
    """On the meta device, sharded, given memory, then initialised from the same seed."""

    def model() -> nn.Sequential:
        return nn.Sequential(
            nn.Conv1d(6, 8, 3), nn.BatchNorm1d(8), nn.Linear(4, 10), nn.LSTM(10, 3), nn.Embedding(9, 4)
        )

    torch.manual_seed(7)
    plain = model()
    with torch.device("meta"):
        sharded = model()
    plan = shardwise.ShardingPlan({"0.weight": 1, "2.weight": 0, "2.bias": 0, "3.*": 0, "4.weight": 1})
    shardwise.shard_module(sharded, plan)
    sharded.to_empty(device="cpu")
    torch.manual_seed(7)
    for layer in sharded:
        layer.reset_parameters()
    for name, parameter in sharded.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, ShardedTensor) else parameter
        assert torch.equal(whole, plain.get_parameter(name)), name


@ranks(4)
def test_a_fill_that_is_recorded_has_no_gradient_to_pass_on() -> None:
    """As torch says of a plain tensor; beside it the graph goes on."""
    weight = torch.ones(SIZE, dtype=torch.float64)
    sharded = shardwise.shard(weight, 0).requires_grad_()
    made = sharded * 2
    made.normal_()
    (made + sharded * 3).sum().backward()
    assert torch.equal(sharded.grad.full_tensor(), torch.full(SIZE, 3.0, dtype=torch.float64))


@ranks(4)
def test_where_ranks_draw_their_own_numbers_each_shard_is_drawn_as_a_plain_tensor() -> None:
    """As on the drop-in: from this rank's own generator, with the fans of the shard; it goes on as after that."""
    for function in (nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_, torch.Tensor.exponential_):
        tensor = shardwise.empty(chunks(0, 0, 1, 2, 3), 8, 6)
        torch.manual_seed(dist.get_rank())
        expected, after = function(torch.empty(2, 6)), torch.rand(2)
        torch.manual_seed(dist.get_rank())
        with settings.own_draws():
            function(tensor)
        assert torch.equal(tensor.local_tensor(), expected)
        assert torch.equal(torch.rand(2), after)
    with settings.own_draws():
        torch.manual_seed(dist.get_rank())
        replicas: list[Any] = [None] * 4
        dist.all_gather_object(replicas, shardwise.rand(None, 5).local_tensor())
    assert all(torch.equal(one, replicas[0]) for one in replicas)


@ranks(2)
def test_generators_stay_together_when_a_rank_fails() -> None:
    """A factory that fails draws nothing, on any rank."""
    torch.manual_seed(5)
    with pytest.raises(ValueError, match="Expecting ShardingSpec"):
        shardwise.rand("rows" if dist.get_rank() else chunks(0, 0, 1), 4)
    first = shardwise.rand(chunks(0, 0, 1), 4).full_tensor()
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(4))


@ranks(2)
def test_ranks_with_different_seeds_are_found_out_where_they_hold_the_same_elements() -> None:
    """When they meet next; the error says what to do. Elements that only one rank holds may be drawn from any seed."""
    torch.manual_seed(dist.get_rank())
    shardwise.rand(0, 4)
    shardwise.check()
    shardwise.rand(None, 4)
    with pytest.raises(ValueError, match=r"seed all ranks alike with torch\.manual_seed"):
        shardwise.check()


@ranks(2)
def test_a_generator_of_another_device_is_refused_on_every_rank() -> None:
    """Also on the rank that holds nothing."""
    with pytest.raises((RuntimeError, ValueError), match="device"):
        shardwise.rand(chunks(0, 0), 4, generator=torch.Generator("meta"))


@ranks(2)
def test_a_seed_for_one_context() -> None:
    """Within it torch's generators have the seed; after it they are as before."""
    torch.manual_seed(1)
    first = torch.rand(2)
    torch.manual_seed(1)
    with layout_independent(seed=7):
        rows = shardwise.rand(0, 4, 4)
    with layout_independent(seed=7):
        columns = shardwise.rand(1, 4, 4)
    assert torch.equal(rows.full_tensor(), columns.full_tensor())
    assert torch.equal(torch.rand(2), first)


@pytest.mark.parametrize("size", [(), (5,), (10**9,), (3, 4), (10**6, 3), (3, 10**6), (7, 4096, 4096), (2, 2, 2, 2)])
def test_tiles_are_bounded_and_cover(size: tuple[int, ...]) -> None:
    """Never more than the limit, never nothing; small trailing dims do not make small tiles."""
    shape = tile_shape(size)
    assert len(shape) == len(size)
    assert 0 < math.prod(shape) <= tiles.TILE
    assert math.prod(tile_shape((512, 64, 3, 3))) > 30_000


@given(st.lists(st.integers(1, 5), max_size=4), st.integers(1, 40))
def test_blocks_are_contiguous_stretches_in_order(size: list[int], most: int) -> None:
    """Together they are all elements, once, in the order of memory; none has more than allowed."""
    numbers = torch.arange(math.prod(size)).view(size)
    found = [numbers[tuple(map(slice, low, high))].flatten() for low, high in flat.blocks(size, most)]
    assert torch.equal(torch.cat(found), numbers.flatten())
    assert all(len(one) <= most for one in found)


def test_functions_that_do_not_draw_in_turn_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch draws by another generator in one go, as with MKL, is read from one whole draw."""
    monkeypatch.setattr(flat, "_splits_on_cpu", lambda draw, dtype: False)
    monkeypatch.setattr(flat, "CHUNK", 8)
    generator = torch.Generator().manual_seed(1)
    numbers = flat.numbers_of(random.UNIFORM, 100, torch.float32, torch.device("cpu"), generator)
    expected = torch.rand(100, generator=torch.Generator().manual_seed(1))
    assert torch.equal(numbers.read(10, 30), expected[10:30])
    assert numbers.drawn == 100


@pytest.mark.parametrize(("step", "rounds"), [(4, (1, 2, 2, 3)), (8, (2, 3, 4, 5))])
def test_a_counter_goes_on_by_whole_rounds(monkeypatch: pytest.MonkeyPatch, step: int, rounds: tuple[int, ...]) -> None:
    """As torch's does on CUDA, where a chunk of numbers of 8 bytes takes two rounds, and the last one maybe one."""

    class Counter:
        offset = 40

        def get_offset(self) -> int:
            return self.offset

        def set_offset(self, offset: int) -> None:
            self.offset = offset

    monkeypatch.setattr(flat, "chunk_on", lambda device: 100)
    for total, count in zip((100, 101, 151, 203), rounds, strict=True):
        source: Any = Counter()
        flat.CountedNumbers(random.UNIFORM, total, torch.float64, torch.device("cpu"), source, step).finish()
        assert source.offset == 40 + 4 * count, total


def test_a_tensor_that_cuda_draws_in_several_parts_is_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 2 GiB on torch draws others, so a rank that holds all of it must not take those either."""

    class Counter:
        def get_offset(self) -> int:
            return 0

    monkeypatch.setattr(flat, "chunk_on", lambda device: 100)
    source: Any = Counter()
    numbers = flat.CountedNumbers(random.UNIFORM, 2**29, torch.float32, torch.device("cpu"), source, 4)
    assert numbers.can_be_drawn_into(torch.empty(2**20, device="meta"))
    assert not numbers.can_be_drawn_into(torch.empty(2**29, device="meta"))


@ranks(2)
def test_a_default_device_changes_no_numbers() -> None:
    """How torch draws is tried on tensors of the CPU, whatever the default is for new ones."""
    flat._splits_on_cpu.cache_clear()
    torch.manual_seed(0)
    expected = torch.randn(SIZE), torch.native_dropout(torch.ones(SIZE), 0.5, True)[0]
    x = shardwise.ones(0, *SIZE)
    torch.manual_seed(0)
    with torch.device("meta"):
        found = shardwise.randn(0, *SIZE), torch.native_dropout(x, 0.5, True)[0]
    assert all(map(holds, found, expected))
