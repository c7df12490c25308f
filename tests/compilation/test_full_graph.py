"""`torch.compile(fullgraph=True)` over sharded tensors: what users do with it."""

from __future__ import annotations

import copy
import itertools
import shutil
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, PLAIN, assert_close, boxes, chunks, places
from tests.compilation.graphs import Counter, transfers
from torch import nn
from torch.nn import functional

import shardwise
from shardwise import ReplicatedShardingSpec, ShardedTensor
from shardwise.errors import LeafWriteError, RankMismatchError
from shardwise.nn import shard_parameter
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

FLOAT = PLAIN.double() / 10


class Layers(nn.Module):
    """Layers of which some are sharded, some replicated and some plain."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.dropout = nn.Dropout(dropout)
        self.power = 2
        self.double()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Of a batch."""
        hidden = torch.relu(self.norm(self.first(rows * self.power)))
        return torch.tanh(self.second(self.dropout(hidden))) * self.scale.exp()


def sharded(plain: nn.Module) -> Any:
    """A copy, with each kind of layout once; from the third rank on, ranks hold nothing but replicas."""
    model: Any = copy.deepcopy(plain)
    shard_parameter(model.first, "weight", chunks(0, 0, 1))
    shard_parameter(model.second, "weight", chunks(1, 0, 1))
    shard_parameter(model, "scale", ReplicatedShardingSpec(places(*range(dist.get_world_size()))))
    return model


def whole(tensor: Any) -> Any:
    """The plain tensor, sharded or not."""
    return tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    """Of every parameter."""
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_close(whole(one.grad), other.grad, name)


def batch(size: int = 5, seed: int = 0) -> torch.Tensor:
    """Rows, the same on every rank."""
    return torch.randn(size, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@ranks(4)
def test_steps_of_an_optimizer() -> None:
    """Parameters after some steps are those of the plain model; nothing is compiled after the first one."""
    plain, counter = Layers(), Counter()
    model = sharded(plain)
    compiled = shardwise.compile(model, fullgraph=True, backend=counter)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (plain, model)]
    for seed in range(3):
        for optimizer, run in zip(optimizers, (plain, compiled), strict=True):
            optimizer.zero_grad()
            run(batch(seed=seed)).pow(2).mean().backward()
            optimizer.step()
    assert counter.counts == (1, 1)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(whole(one.detach()), other.detach())


@ranks(4)
def test_gradients_accumulate_over_several_calls() -> None:
    """Two calls before one backward, then another backward without zero_grad."""
    plain, counter = Layers(), Counter()
    model = sharded(plain)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for run in (plain, compiled):
        (run(batch()).sum() + run(batch(seed=1)).pow(2).sum()).backward()
        run(batch(seed=2)).sum().backward()
    assert_same_gradients(model, plain)
    assert counter.counts == (1, 1)


@ranks(2)
def test_each_kind_of_call_has_its_graph() -> None:
    """Sizes, grad mode, training and attributes; a kind that was there before is not compiled again."""
    plain, counter = Layers(), Counter()
    model = sharded(plain)
    compiled = torch.compile(model, fullgraph=True, backend=counter)

    def compare(rows: torch.Tensor) -> int:
        assert_close(whole(compiled(rows).detach()), plain(rows).detach())
        return len(counter.forwards)

    assert [compare(batch(5)), compare(batch(3)), compare(batch(5))] == [1, 2, 2]
    with torch.no_grad():
        assert [compare(batch(5)), compare(batch(5))] == [3, 3]
    for one in (plain, model):
        one.eval()
    assert compare(batch(5)) == 4
    for one in (plain, model):
        one.train()
        one.power = 3
    assert compare(batch(5)) == 5
    for one in (plain, model):
        one.power = 2
    assert compare(batch(5)) == 5


def function(tensor: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """Of a sharded and a plain tensor."""
    plain = (plain + 1).sin()
    return (tensor * plain).relu().sum(0) + plain.cos().sum(0)


@ranks(4)
def test_a_function_of_sharded_tensors_however_they_are_cut() -> None:
    """Uneven, replicated, several shards on a rank, none: value and gradients of both arguments."""
    other = torch.linspace(0, 1, 42, dtype=torch.float64).reshape(7, 6)
    for name, spec in ALL.items():
        counter = Counter()
        compiled = torch.compile(function, fullgraph=True, backend=counter)
        expected, given = FLOAT.clone().requires_grad_(), other.clone().requires_grad_()
        function(expected, given).sin().sum().backward()
        for _ in range(2):
            tensor, plain = shard_tensor(FLOAT, spec).requires_grad_(), other.clone().requires_grad_()
            made = compiled(tensor, plain)
            assert_close(whole(made.detach()), function(FLOAT, other), name)
            made.sin().sum().backward()
            assert_close(whole(tensor.grad), expected.grad, name)
            assert_close(plain.grad, given.grad, name)
        assert counter.counts == (1, 1), name


@ranks(4)
def test_results_of_ops_as_arguments() -> None:
    """Their gradients go on into the graph that made them; replicas bring a part of them on each rank."""
    for spec in (chunks(0, 0, 1), ReplicatedShardingSpec(places(0, 1, 2, 3))):
        plain = FLOAT.clone().requires_grad_()
        leaf = shard_tensor(FLOAT, spec).requires_grad_()
        compiled = torch.compile(function, fullgraph=True, backend=Counter())
        other = torch.ones(7, 6, dtype=torch.float64)
        function(plain.sin() * 2, other).sum().backward()
        compiled(leaf.sin() * 2, other).sum().backward()
        assert_close(whole(leaf.grad), plain.grad)


@ranks(4)
def test_transfers_are_ops_of_the_graph() -> None:
    """In the order in which the model needs them; the sums of the gradients of all replicas are one."""
    plain, counter = Layers(), Counter()
    compiled = torch.compile(sharded(plain), fullgraph=True, backend=counter)
    compiled(batch()).sum().backward()
    assert transfers(counter.forwards[0])
    sums = [said for said in transfers(counter.backwards[0]) if said.startswith("sum of")]
    assert len(sums) == 1
    assert int(sums[0].split()[2]) > 1


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """A loss within the compiled function."""
    return functional.mse_loss(model(rows), rows)


@ranks(2)
def test_the_loss_within_the_graph() -> None:
    """A model as an argument of the compiled function is found in its closure."""
    plain, counter = Layers(), Counter()
    model = sharded(plain)
    compiled = torch.compile(lambda rows: loss_of(model, rows), fullgraph=True, backend=counter)
    losses = [loss_of(plain, batch()), compiled(batch())]
    for loss in losses:
        loss.backward()
    assert_close(whole(losses[1].detach()), losses[0].detach())
    assert_same_gradients(model, plain)
    assert counter.counts == (1, 1)


@pytest.mark.parametrize("causal", [False, True])
@ranks(4)
def test_ranks_without_operands_send_in_the_backward(causal: bool) -> None:
    """Not in the forward, where compilers put what depends on no gradient: two ranks have no piece of the sequence."""
    spec = boxes(([0, 0, 0, 0], [1, 4, 5, 8], 3), ([0, 0, 5, 0], [1, 4, 10, 8], 0), ([0, 0, 15, 0], [1, 4, 1, 8], 3))

    def attend(*tensors: Any) -> Any:
        return functional.scaled_dot_product_attention(*tensors, is_causal=causal)

    torch.manual_seed(0)
    plain = [torch.randn(1, 4, 16, 8, dtype=torch.float64).requires_grad_() for _ in range(3)]
    tried = [shard_tensor(one.detach(), spec).requires_grad_() for one in plain]
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for run, tensors in ((attend, plain), (compiled, tried)):
        found = run(*tensors)
        (found * found).sum().backward()
    for one, other in zip(tried, plain, strict=True):
        assert_close(one.grad.full_tensor(), other.grad)


@ranks(2)
def test_modules_that_compile_themselves() -> None:
    """`module.compile(fullgraph=True)`."""
    plain = Layers()
    model = sharded(plain)
    model.compile(fullgraph=True, backend="aot_eager")
    assert_close(whole(model(batch()).detach()), plain(batch()).detach())


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@ranks(2)
def test_inductor_compiles_the_graphs() -> None:
    """The default backend, with an option of its own."""
    plain = Layers()
    model = sharded(plain)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # inductor's own imports
        compiled = shardwise.compile(model, fullgraph=True, options={"epilogue_fusion": False})
        for run in (plain, compiled):
            run(batch()).pow(2).mean().backward()
    assert_same_gradients(model, plain)


@ranks(4)
def test_dropout_draws_as_without_compiling() -> None:
    """The same numbers, in the same order, from generators that are seeded alike; other ones in the next call."""
    plain = Layers(dropout=0.5)
    found = []
    for compiles in (False, True):
        model = sharded(plain)
        run = torch.compile(model, fullgraph=True, backend=Counter()) if compiles else model
        torch.manual_seed(3)
        made = [run(batch()), run(batch())]
        (made[0] + 2 * made[1]).sum().backward()
        assert not torch.equal(whole(made[0].detach()), whole(made[1].detach()))
        found.append([*[whole(one.detach()) for one in made], *[whole(one.grad) for one in model.parameters()]])
    for one, other in zip(*found, strict=True):
        assert_close(one, other)


@ranks(2)
def test_inference_mode_and_autocast() -> None:
    """Each has a graph of its own, which gives what the model gives without compiling."""
    model, counter = sharded(Layers()), Counter()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    with torch.inference_mode():
        assert_close(whole(compiled(batch())), whole(model(batch())))
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = compiled(batch().float()), model(batch().float())
    assert torch.equal(whole(found.detach()), whole(expected.detach()))
    found.sum().backward()
    assert counter.counts == (2, 1)


class Writing(nn.Module):
    """Writes into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(6, dtype=torch.float64))

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts in a buffer."""
        self.steps.add_(1)
        return tensor * self.steps


@ranks(2)
def test_writes_into_buffers() -> None:
    """Each call of the graph writes once."""
    tensor, model = shard_tensor(FLOAT, chunks(0, 0, 1)), Writing()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for step in (1, 2, 3):
        assert_close(whole(compiled(tensor)), FLOAT * step)
    assert_close(model.steps, torch.full((6,), 3.0, dtype=torch.float64))


def writes_and_reads(tensor: torch.Tensor) -> torch.Tensor:
    """Writes into its argument."""
    tensor.mul_(2)
    return tensor.sin()


@ranks(2)
def test_writes_into_results_while_gradients_are_recorded() -> None:
    """An argument that is no leaf may be written into, and the gradient goes on through it."""
    plain = FLOAT.clone().requires_grad_()
    leaf = shard_tensor(FLOAT, chunks(0, 0, 1)).requires_grad_()
    compiled = torch.compile(writes_and_reads, fullgraph=True, backend="aot_eager")
    for run, one in ((writes_and_reads, plain), (compiled, leaf)):
        given = (one * 1).T  # which is not contiguous
        (run(given).sum() + given.sum()).backward()
    assert_close(whole(leaf.grad), plain.grad)
    with pytest.raises(LeafWriteError, match="change a clone"):  # as without compiling
        compiled(leaf)


@ranks(2)
def test_the_stance_force_eager() -> None:
    """Calls run as they are."""
    tensor, numbers = shard_tensor(FLOAT, chunks(0, 0, 1)), itertools.count()

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        next(numbers)
        return tensor * 2

    compiled = torch.compile(counted, fullgraph=True, backend="aot_eager")
    compiled(tensor)
    before = next(numbers)
    compiled(tensor)
    assert next(numbers) == before + 1
    with torch.compiler.set_stance("force_eager"):
        compiled(tensor)
    assert next(numbers) == before + 3


def adds_own(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Moves as many times as it is told."""
    for _ in range(number):
        tensor = tensor @ tensor.T @ tensor
    return tensor


@ranks(2)
def test_ranks_that_would_compile_different_graphs_find_out() -> None:
    """Before anything runs: what each has traced is compared."""
    tensor = shard_tensor(FLOAT, chunks(0, 0, 1))
    compiled = torch.compile(adds_own, fullgraph=True, backend="aot_eager")
    with pytest.raises(RankMismatchError, match="transfers"):
        compiled(tensor, 1 + dist.get_rank())


@ranks(2)
def test_plain_tensors_are_left_to_torch() -> None:
    """The same function, given plain tensors only."""
    counter = Counter()
    found = torch.compile(function, fullgraph=True, backend=counter)(FLOAT, FLOAT)
    assert_close(found, function(FLOAT, FLOAT))
    assert len(counter.forwards) == 1


def test_nothing_of_it_is_imported_before_it_is_used() -> None:
    """Importing the library loads the verb alone."""
    said = (
        "import sys, shardwise; found = {name for name in sys.modules if name.startswith('shardwise.compilation.')}; "
        "assert {name.rpartition('.')[2] for name in found} == {'entry', 'compiled_threads', 'input_places'}, found"
    )
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
