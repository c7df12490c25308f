"""Training steps as CUDA graphs, by `shardwise.capture` and by torch's own context, on one rank and on NCCL ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import shardwise
from shardwise.errors import CaptureError, RankMismatchError
from shardwise.ops.embedding import masked_sums
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDTH, WORDS, STEPS = 32, 48, 7


class Model(nn.Module):
    """A table, attention, a norm and dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.RMSNorm(WIDTH)
        self.dropout = dropout

    def forward(self, ids: torch.Tensor) -> Any:
        """The logits of the next words."""
        x = self.table(ids)
        q, k, v = (part(x).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        x = x + functional.dropout(self.down(functional.gelu(self.up(self.norm(x)))), self.dropout)
        return self.head(x)


def chunks(dim: int) -> shardwise.ChunkShardingSpec:
    """A dim in chunks over all ranks."""
    return shardwise.ChunkShardingSpec(dim, [f"rank:{rank}/cuda:0" for rank in range(dist.get_world_size())])


def sharded(model: nn.Module, *by_rows: str) -> nn.Module:
    """Rows and columns over all ranks, as tensor parallelism cuts them; by rows also what these patterns name."""
    rows, columns = chunks(0), chunks(1)
    by_name = dict.fromkeys(["q.weight", "k.weight", "v.weight", "up.*", *by_rows], rows)
    return shardwise.shard_module(
        model.cuda(), shardwise.ShardingPlan({**by_name, "o.weight": columns, "down.weight": columns})
    )


def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """A step with gradient clipping."""

    def step(ids: torch.Tensor, labels: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    return step


def local(tensor: Any) -> list[torch.Tensor]:
    """The tensors of this rank."""
    return tensor._local_tensors() if isinstance(tensor, shardwise.ShardedTensor) else [tensor]


def assert_captured_as_eager(dropout: float, *by_rows: str) -> None:
    """Parameters and the state of the generator after some steps, the first of which are no replays."""
    torch.manual_seed(0)
    model = Model(dropout)
    batches = [torch.randint(WORDS, (2, 4, 6), device="cuda") for _ in range(STEPS)]
    found = []
    for captures in (False, True):
        twin = sharded(copy.deepcopy(model), *by_rows)
        step: Any = training(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2, capturable=True))
        if captures:
            step = shardwise.capture(step)
        torch.cuda.manual_seed(1)
        losses = [[one.detach().item() for one in local(step(ids, labels))] for ids, labels in batches]
        states = [one for parameter in twin.parameters() for one in local(parameter)]
        found.append((losses, states, torch.cuda.get_rng_state()))
    (losses, states, generator), (others, captured, advanced) = found
    assert losses == others
    assert all(map(torch.equal, states, captured))
    assert torch.equal(generator, advanced)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@ranks(1, backend="nccl")
def test_a_captured_step_is_the_eager_one(dropout: float) -> None:
    """In a world of one, with AdamW, clipping and dropout."""
    assert_captured_as_eager(dropout)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@ranks(2, backend="nccl")
def test_a_captured_step_of_two_ranks(dropout: float) -> None:
    """The same, tensor parallel."""
    assert_captured_as_eager(dropout)


@ranks(4, backend="nccl")
def test_a_captured_step_of_four_ranks() -> None:
    """The same, tensor parallel."""
    assert_captured_as_eager(0.0)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@ranks(2, backend="nccl")
def test_a_captured_step_with_a_table_cut_by_rows(dropout: float) -> None:
    """The same: rows are added up from what each rank has of them, whatever the ids of a replay are."""
    assert_captured_as_eager(dropout, "table.weight")


@ranks(2, backend="nccl")
def test_a_captured_lookup_of_a_large_batch() -> None:
    """Whose rows are exchanged outside of a capture, and added up within; of plain ids, and of ids of each rank."""
    plain = torch.rand(WORDS, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    weight = shard_tensor(plain, chunks(0))
    generator = torch.Generator("cuda").manual_seed(1)
    batches = [torch.randint(WORDS, (4, 6), device="cuda", generator=generator) for _ in range(5)]
    for prepare in (torch.clone, lambda ids: shard_tensor(ids, chunks(0))):
        lookup = shardwise.capture(lambda ids: functional.embedding(ids, weight))
        with mock.patch.object(masked_sums, "MOST_ON_ACCELERATOR", -1):
            for ids in batches:
                found, place = lookup(prepare(ids)), dist.get_rank() * 2  # the first of this rank's samples
                assert [tuple(one.shape) for one in local(found)] == [(2, 6, WIDTH)]
                assert torch.equal(local(found)[0], plain[ids[place : place + 2]])


@ranks(1, backend="nccl")
def test_torchs_own_context() -> None:
    """`torch.cuda.graph` captures a step, as of a plain model."""
    torch.manual_seed(0)
    model = sharded(Model(0.0))
    step = training(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    ids, labels = torch.randint(WORDS, (2, 4, 6), device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(ids, labels)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(ids, labels)
    found = []
    for _ in range(5):
        graph.replay()
        found.append(local(loss)[0].detach().item())
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


@pytest.mark.filterwarnings("ignore:.*cuBLAS.*", "ignore:.*AccumulateGrad.*")
@pytest.mark.parametrize("world", [1, 2])
def test_graphed_callables(world: int) -> None:
    """`torch.cuda.make_graphed_callables` of a module: values and gradients of new inputs."""
    ranks(world, backend="nccl")(_graphed)()


def _graphed() -> None:
    warnings.filterwarnings("ignore", message=".*(cuBLAS|AccumulateGrad).*")
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)).cuda().double()
    model = copy.deepcopy(plain)
    places = {"0.weight": chunks(0), "0.bias": chunks(0), "2.weight": chunks(1)}
    shardwise.shard_module(model, shardwise.ShardingPlan(places))
    sample = torch.randn(8, WIDTH, device="cuda", dtype=torch.float64, requires_grad=True)
    graphed = torch.cuda.make_graphed_callables(model, (sample,))
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(8, WIDTH, device="cuda", dtype=torch.float64, requires_grad=True)
        for one in (plain, model):
            one.zero_grad()
        expected = plain(x)
        (grad,) = torch.autograd.grad(expected.square().sum(), x, retain_graph=True)
        expected.square().sum().backward(inputs=list(plain.parameters()))
        made: Any = graphed(x)
        made.square().sum().backward()
        torch.testing.assert_close(made.full_tensor(), expected)
        torch.testing.assert_close(x.grad, grad)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            found: Any = ours.grad
            torch.testing.assert_close(found if type(found) is torch.Tensor else found.full_tensor(), theirs.grad)


@ranks(2, backend="nccl")
def test_a_step_that_reads_a_value_is_refused_on_every_rank() -> None:
    """Also where only one rank reads it; the ranks go on afterwards."""
    x = shardwise.shard(torch.randn(8, 4, device="cuda"), 0)

    def step(x: Any) -> Any:
        if dist.get_rank() == 1:
            local(x)[0].sum().item()
        return x * 2

    captured = shardwise.capture(step, warm_up=1)
    captured(x)
    with pytest.raises(CaptureError, match="cannot be captured"):
        captured(x)
    assert (x + 1).sum().item() == pytest.approx((x.full_tensor() + 1).sum().item())


@ranks(2, backend="nccl")
def test_ranks_that_replay_not_equally_often_are_found() -> None:
    """Where they meet next: the step itself has no collective that would notice."""
    x = shardwise.shard(torch.ones(8, 4, device="cuda"), 0)
    captured = shardwise.capture(lambda x: x * 2, warm_up=1)
    for _ in range(3 + dist.get_rank()):
        captured(x)
    with pytest.raises(RankMismatchError):
        shardwise.check()


@ranks(1, backend="nccl")
def test_other_arguments_are_refused_and_batches_are_left_alone() -> None:
    """Arguments are copied into the graph's own memory."""
    captured = shardwise.capture(lambda x, scale: x * scale, warm_up=0)
    batches = [torch.full((3,), float(k), device="cuda") for k in range(4)]
    assert [captured(x, 2.0).tolist() for x in batches] == [[2.0 * k] * 3 for k in range(4)]
    assert [x.tolist() for x in batches] == [[float(k)] * 3 for k in range(4)]
    for args in ((torch.zeros(4, device="cuda"), 2.0), (batches[0], 3.0), (batches[0],)):
        with pytest.raises(CaptureError):
            captured(*args)
    with pytest.raises(CaptureError, match="move"):
        shardwise.capture(lambda x: x, warm_up=0)(torch.zeros(3))
