"""Gradients of replicated and plain leaves come in buckets, and are those of the plain model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.cases import assert_close, chunks, places
from torch.utils.checkpoint import checkpoint

from shardwise import ReplicatedShardingSpec
from shardwise.autograd import buckets as gradient_buckets
from shardwise.autograd.buckets import LeafGradient, sum_together
from shardwise.autograd.task import running_tasks
from shardwise.comm.transfer import all_reduce
from shardwise.comm.transfer.all_reduce import holding_of
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

LAYERS, WIDTH, SHARED = 4, 6, (3, 1)  # layers, features, and the ranks that hold the replicas of scales


class Model:
    """Rows of a table go through layers: a plain weight and bias each, a bias that all use, replicated scales."""

    def __init__(self, *, sharded: bool, ranks: tuple[int, ...] = (0, 1, 2)) -> None:
        drawn = torch.Generator().manual_seed(5)

        def rand(*size: int) -> torch.Tensor:
            return torch.rand(size, generator=drawn, dtype=torch.float64)

        self.table = rand(8, WIDTH).requires_grad_()
        self.weights = [rand(WIDTH).requires_grad_() for _ in range(LAYERS)]
        self.biases = [rand(WIDTH).requires_grad_() for _ in range(LAYERS)]
        self.tied = rand(WIDTH).requires_grad_()
        self.scales: list[Any] = [rand(8, WIDTH) for _ in range(2)]
        if sharded:
            self.table = shard_tensor(self.table.detach(), chunks(0, *ranks)).requires_grad_()
            spec = ReplicatedShardingSpec(places(*SHARED))
            self.scales = [shard_tensor(scale, spec) for scale in self.scales]
        for scale in self.scales:
            scale.requires_grad_()
        self.everything = [self.table, *self.weights, *self.biases, self.tied, *self.scales]

    def layer(self, x: Any, number: int) -> Any:
        """One layer; all are alike but for their weights."""
        return torch.tanh(x * self.weights[number] + self.biases[number] + self.tied)

    def loss(self, call: Callable[..., Any] = lambda function, *args: function(*args)) -> Any:
        """A number."""
        x = self.table
        for number in range(LAYERS):
            x = call(self.layer, x, number) * self.scales[number % 2]
        return (x * x).sum()


def whole(tensor: Any) -> Any:
    """All of a tensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Counted:
    """How many sums over ranks are begun."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> Counted:
        original = all_reduce.AllReduce.__init__

        def counted(one: Any, *args: Any, **kwargs: Any) -> None:
            self.count += 1
            original(one, *args, **kwargs)

        self.patch = mock.patch.object(all_reduce.AllReduce, "__init__", counted)
        self.patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.stop()


def same_gradients(ours: Model, plain: Model) -> None:
    """Of every leaf, on every rank."""
    for one, other in zip(ours.everything, plain.everything, strict=True):
        assert_close(whole(one.grad), other.grad)


def checkpointed(function: Any, *args: Any) -> Any:
    """Without a backward in the backward."""
    return checkpoint(function, *args, use_reentrant=False)


@ranks(4)
def test_steps_with_buckets_are_those_of_the_plain_model() -> None:
    """One message for all of them; two backwards add up, a graph that is kept, checkpoints, full buckets, SGD."""
    ours, plain = Model(sharded=True), Model(sharded=False)
    with Counted() as counted:
        ours.loss().backward()
    assert counted.count == 1
    plain.loss().backward()
    same_gradients(ours, plain)
    with mock.patch.object(gradient_buckets, "BUCKET_BYTES", 200), Counted() as counted:  # several are full on the way
        ours.loss().backward()
    assert 4 <= counted.count < len(ours.everything)
    plain.loss().backward()
    same_gradients(ours, plain)
    for model in (ours, plain):
        loss = model.loss()
        loss.backward(retain_graph=True)
        loss.backward()
        with torch.no_grad():
            for leaf in model.everything:
                leaf -= 1e-3 * leaf.grad
                leaf.grad = None
        model.loss().backward()
    same_gradients(ours, plain)
    ours, plain = Model(sharded=True, ranks=(0, 1, 2, 3)), Model(sharded=False)
    ours.loss(checkpointed).backward()
    plain.loss().backward()
    same_gradients(ours, plain)
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, [leaf.grad for leaf in (*ours.weights, *ours.biases, ours.tied)])
    assert all(torch.equal(one, other) for each in everyone for one, other in zip(each, everyone[0], strict=True))


@ranks(4)
def test_who_looks_at_a_gradient_within_the_backward_gets_it_there() -> None:
    """Hooks, torch.autograd.grad, gradients of gradients, and backwards to some leaves only."""
    ours, plain = Model(sharded=True), Model(sharded=False)
    seen: list[torch.Tensor] = []
    for model in (ours, plain):
        seen.clear()
        model.weights[0].register_hook(lambda grad: (seen.append(grad.clone()), 2 * grad)[1])  # type: ignore[func-returns-value]
        model.biases[0].register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
        model.scales[0].register_hook(lambda grad: 3 * grad)
        if model is ours:
            ours.scales[1].register_post_accumulate_grad_hook(lambda leaf: seen.append(ours.tied.grad.clone()))
        model.loss().backward()
        if model is ours:
            ours_seen = list(seen)
    same_gradients(ours, plain)
    assert_close(ours_seen[:2], seen[:2])
    assert_close(ours_seen[2], plain.tied.grad)  # there, before the hook of another leaf looks
    ours, plain = Model(sharded=True), Model(sharded=False)
    for leaf in ("weights", "tied", "scales"):
        given = [getattr(model, leaf)[0] if leaf != "tied" else model.tied for model in (ours, plain)]
        (one,), (other,) = (torch.autograd.grad(m.loss(), [g]) for m, g in zip((ours, plain), given, strict=True))
        assert_close(whole(one), other)
    assert ours.tied.grad is None
    for model in (ours, plain):
        (grad,) = torch.autograd.grad(model.loss(), [model.tied], create_graph=True)
        (grad * grad).sum().backward()
    same_gradients(ours, plain)
    for model in (ours, plain):
        for one in model.everything:
            one.grad = None
        model.loss().backward(inputs=[model.tied, model.weights[1]])
    assert ours.weights[0].grad is None
    assert_close([ours.tied.grad, ours.weights[1].grad], [plain.tied.grad, plain.weights[1].grad])


@ranks(2)
def test_the_gradients_of_plain_parameters_are_sent_together() -> None:
    """In one message for all layers of a module, which has no sharded parameter."""
    rows = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    ours, plain = (torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2)).double() for _ in range(2))
    for module in (ours, plain):
        for parameter in module.parameters():
            torch.nn.init.constant_(parameter, 0.5)
    with Counted() as counted:
        ours(shard_tensor(rows, chunks(0, 0, 1))).square().sum().backward()
    assert counted.count == 1
    plain(rows).square().sum().backward()
    assert_close([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])


@ranks(2)
def test_leaves_that_ddp_manages_get_their_gradients_at_once() -> None:
    """DDP reduces within the backward, without a hook that could be seen."""
    bias = torch.nn.Linear(3, 3, dtype=torch.float64)
    parallel = torch.nn.parallel.DistributedDataParallel(bias)
    table = shard_tensor(torch.arange(12.0, dtype=torch.float64).view(4, 3), chunks(0, 0, 1))
    out = parallel(torch.ones(3, dtype=torch.float64))
    (table * out * bias.bias).sum().backward()
    plain = torch.nn.Linear(3, 3, dtype=torch.float64)
    plain.load_state_dict(bias.state_dict())
    whole_table = table.full_tensor()
    (whole_table * plain(torch.ones(3, dtype=torch.float64)) * plain.bias).sum().backward()
    assert_close([p.grad for p in bias.parameters()], [p.grad for p in plain.parameters()])


@ranks(2)
def test_a_backward_that_fails_leaves_no_buckets() -> None:
    """The next one is as if it had not been."""
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    table = shard_tensor(torch.ones(4, 3, dtype=torch.float64), chunks(0, 0, 1)).requires_grad_()

    def fail(grad: Any) -> None:
        raise ZeroDivisionError("in a hook")

    first = table * 1
    first.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        (first.exp() * weight).sum().backward()
    assert weight.grad is None
    assert not running_tasks()
    (table * weight).sum().backward()
    assert_close(weight.grad, torch.full((3,), 4.0, dtype=torch.float64))


@ranks(4)
def test_one_tensor_may_be_the_gradient_of_several_leaves() -> None:
    """Compilers make one of tensors that hold the same; each is added up over the ranks that hold its leaf."""
    some, everyone = (ReplicatedShardingSpec(places(*ranks)).layout([3]) for ranks in ((0, 2), (0, 1, 2, 3)))
    group, gradient = dist.group.WORLD, torch.full((3,), dist.get_rank() + 1.0, dtype=torch.float64)
    assert group is not None
    holdings = [holding_of(layout, dist.get_rank(), 4) for layout in (some, everyone, everyone)]
    gradients = [
        LeafGradient(one, "a leaf", [gradient] * len(one.teams), [gradient] * len(one.teams)) for one in holdings
    ]
    sums = sum_together(gradients, group, torch.float64)
    expected = [4.0, 10.0, 10.0] if dist.get_rank() in (0, 2) else [10.0, 10.0]
    assert [one.tolist() for one in sums] == [[number] * 3 for number in expected]
