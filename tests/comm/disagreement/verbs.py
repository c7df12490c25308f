"""The public verbs, and how one rank may do otherwise in each: with other arguments, or such that it alone raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from tests.cases import chunks
from tests.comm.disagreement.given import (
    COLUMNS,
    ODD,
    PLACES,
    PLAIN,
    ROWS,
    WRONG,
    amp,
    backward_of,
    backward_with_a_hook_that_raises,
    buffered,
    compared,
    drawn,
    drop,
    failing,
    looked_up,
    mesh,
    misshaped,
    model,
    muon,
    plain_weight,
    rank,
    recorded,
    replicated,
    sharded_model,
    shards,
    trained,
    two_layouts,
    whole_twice,
    with_ints,
)
from torch import nn
from torch.nn import functional

import shardwise
from shardwise import ShardedOptimizer, ShardingPlan
from shardwise.interop.dcp import full_state_dict
from shardwise.tensor import shard_tensor
from shardwise.tensor.partial import PartialTensor, ReplicatedTensor

Do = Callable[[Any], Any]


class Verb(NamedTuple):
    """What all ranks call with what they were given, and what the odd one calls instead; None: nothing like it."""

    right: Do
    other: Do | None = None  # with other arguments
    bad: Do | None = None  # with arguments that this rank alone finds wrong
    given: Callable[[], Any] = lambda: shard_tensor(PLAIN, ROWS)
    silent: tuple[str, ...] = ()  # faults that nobody notices, as docs/limits.md says: what each rank does is local


VERBS: dict[str, Verb] = {
    "zeros": Verb(
        lambda _: shardwise.zeros(ROWS, 9, 6),
        lambda _: shardwise.zeros(ROWS, 9, 6, dtype=torch.float64),
        lambda _: shardwise.zeros(WRONG, 9, 6),
    ),
    "ones, full, empty": Verb(
        lambda _: shardwise.ones(ROWS, 9, 6),
        lambda _: shardwise.empty(ROWS, 9, 6),
        lambda _: shardwise.full(WRONG, (9, 6), 1.0),
    ),
    "rand, randn": Verb(
        lambda _: shardwise.rand(ROWS, 9, 6), lambda _: shardwise.randn(ROWS, 9, 6), lambda _: shardwise.rand(ROWS, -1)
    ),
    "rand of replicas": Verb(
        drawn,
        lambda given: drawn(given, torch.float64),
        given=lambda: shard_tensor(PLAIN, shardwise.ReplicatedShardingSpec(PLACES)),
    ),
    "shard_tensor": Verb(
        lambda _: shard_tensor(PLAIN, ROWS),
        lambda _: shard_tensor(PLAIN.double(), ROWS),
        lambda _: shard_tensor(PLAIN.t(), ROWS),
    ),
    "init_from_local_shards": Verb(
        lambda _: shardwise.tensor.init_from_local_shards(shards(3), 9, 2),
        lambda _: shardwise.tensor.init_from_local_shards(shards(3), 9, 3),
        lambda _: shardwise.tensor.init_from_local_shards(WRONG, 9, 2),
    ),
    "from_local": Verb(
        lambda _: shardwise.from_local(torch.ones(rank(), 2)),
        lambda _: shardwise.from_local(torch.ones(1, 2).int()),
        lambda given: shardwise.from_local(given),
    ),
    "full_tensor": Verb(
        lambda given: given[0].full_tensor(),
        lambda given: given[1].full_tensor(),
        lambda given: misshaped(given[0]).full_tensor(),
        with_ints,
    ),
    "gather": Verb(
        lambda given: given[0].gather(0, torch.empty(9, 6) if rank() == 0 else None),
        lambda given: given[1].gather(0, None),
        lambda given: given[0].gather(0, torch.empty(9, 6)),
        with_ints,
    ),
    "gather to another rank": Verb(
        lambda given: given.gather(0, torch.empty(9, 6) if rank() == 0 else None),
        lambda given: given.gather(ODD, torch.empty(9, 6)),
    ),
    "redistribute": Verb(
        lambda given: given[0].redistribute(COLUMNS),
        lambda given: given[1].redistribute(COLUMNS),
        lambda given: given[0].redistribute(WRONG),
        with_ints,
    ),
    "redistribute in rounds": Verb(
        lambda given: given.redistribute(COLUMNS, max_bytes=8),
        lambda given: given.redistribute(COLUMNS, max_bytes=16),
        lambda given: misshaped(given).redistribute(COLUMNS, max_bytes=8),
    ),
    "redistribute, begun": Verb(
        lambda given: given[0].redistribute(COLUMNS, async_op=True).wait(),
        lambda given: given[1].redistribute(COLUMNS, async_op=True).wait(),
        given=with_ints,
    ),
    "reshard": Verb(
        lambda given: given[0].reshard(COLUMNS),
        lambda given: given[1].reshard(COLUMNS),
        lambda given: given[0].reshard(None),
        with_ints,
    ),
    "copy_ from another layout": Verb(
        lambda given: given[0].copy_(given[1]),
        lambda given: given[0].int().copy_(given[1]),
        lambda given: given[0].copy_(given[1][:, :5]),
        two_layouts,
    ),
    "copy_ from the same layout": Verb(
        lambda given: given[0].copy_(given[0] + 1),
        lambda given: given[0].copy_(given[1]),
        given=two_layouts,
        silent=("skips",),
    ),
    "to": Verb(lambda given: given[0].to("meta"), lambda given: given[1].to("meta"), given=with_ints),
    "matmul": Verb(
        lambda given: given @ given.t(),
        lambda given: given.double() @ given.double().t(),
        lambda given: given @ given[1:],
    ),
    "sum": Verb(lambda given: given.sum(), lambda given: given.mean(), lambda given: misshaped(given).sum(1).sum()),
    "sum of a dim": Verb(lambda given: given.sum(0), lambda given: given.sum(1), lambda given: given.sum(5)),
    "add": Verb(lambda given: given + 1, lambda given: given + 2, silent=("other", "skips")),
    "softmax": Verb(lambda given: given.softmax(0), lambda given: given.softmax(1), lambda given: given.softmax(5)),
    "item": Verb(lambda given: given.max().item(), lambda given: given.min().item()),
    "sort, on gathered operands": Verb(
        lambda given: given.flatten().sort(), lambda given: given.flatten().sort(descending=True)
    ),
    "a mask": Verb(lambda given: given[given > 7], lambda given: given.int()[given > 7]),
    "embedding": Verb(
        lambda given: functional.embedding(shardwise.from_local(torch.tensor([1])), given),
        lambda given: functional.embedding(shardwise.from_local(torch.tensor([1])), given.double()),
        lambda given: functional.embedding(shardwise.from_local(torch.tensor([9])), given),
    ),
    "index_select": Verb(
        lambda given: given.index_select(0, torch.tensor([1])),
        lambda given: given.index_select(1, torch.tensor([1])),
        lambda given: given.index_select(0, torch.tensor([9])),
    ),
    "torch.gather": Verb(
        lambda given: torch.gather(given, 1, shardwise.from_local(torch.zeros(3, 1, dtype=torch.int64))),
        bad=lambda given: torch.gather(given, 1, shardwise.from_local(torch.full((3, 1), 7))),
    ),
    "cross_entropy": Verb(
        lambda given: functional.cross_entropy(given, shardwise.from_local(torch.tensor([1, 2, 3]))),
        lambda given: functional.cross_entropy(given, shardwise.from_local(torch.tensor([1, 2, 3])), reduction="sum"),
        lambda given: functional.cross_entropy(given, shardwise.from_local(torch.tensor([1, 2, 7]))),
    ),
    "cross_entropy of many classes": Verb(
        lambda given: functional.cross_entropy(given.t(), shardwise.from_local(torch.tensor([1, 2]))),
        bad=lambda given: functional.cross_entropy(given.t(), shardwise.from_local(torch.tensor([1, 9]))),
    ),
    "backward": Verb(backward_of, bad=backward_with_a_hook_that_raises, given=recorded),
    "backward of a sum": Verb(lambda given: given[1].sum().backward(), given=recorded),
    "backward to a plain operand": Verb(backward_of, given=plain_weight),
    "backward to replicas": Verb(backward_of, given=replicated),
    "backward of an embedding": Verb(backward_of, given=looked_up),
    "backward, twice": Verb(backward_of, given=whole_twice),
    "autograd.grad": Verb(lambda given: torch.autograd.grad(given[1].sum(), given[0]), given=recorded),
    "ShardedOptimizer": Verb(
        lambda given: ShardedOptimizer({"w": given}, torch.optim.AdamW, lr=0.1),
        lambda given: ShardedOptimizer({"w": given}, torch.optim.AdamW, lr=0.2),
        lambda given: ShardedOptimizer({"w": given}, torch.optim.AdamW, lr=-1),
        given=lambda: shard_tensor(PLAIN, ROWS).requires_grad_(),
    ),
    "step": Verb(lambda given: given[1].step(), bad=lambda given: given[1].step(lambda: 1 / 0), given=trained),
    "step with whole parameters": Verb(lambda given: given[1].step(), given=muon),
    "state_dict": Verb(
        lambda given: given[1].state_dict(), bad=lambda given: failing(given[1]).state_dict(), given=trained
    ),
    "state_dict of whole parameters": Verb(lambda given: given[1].state_dict(), given=muon),
    "load_state_dict": Verb(
        lambda given: given[1].load_state_dict(given[1].state_dict()),
        bad=lambda given: given[1].load_state_dict(drop(given[1].state_dict())),
        given=trained,
    ),
    "clip_grad_norm_": Verb(
        lambda given: nn.utils.clip_grad_norm_(given[0].parameters(), 1.0),
        lambda given: nn.utils.clip_grad_norm_(given[0].parameters(), 1.0, norm_type=1.0),
        given=trained,
    ),
    "shard_module": Verb(
        lambda _: shardwise.shard_module(model(), ShardingPlan({"0.weight": ROWS})),
        lambda _: shardwise.shard_module(model(), ShardingPlan({"0.weight": COLUMNS})),
        lambda _: shardwise.shard_module(model(), ShardingPlan({"7.weight": ROWS})),
    ),
    "shard_parameter": Verb(
        lambda _: shardwise.nn.shard_parameter(model()[0], "weight", ROWS),
        lambda _: shardwise.nn.shard_parameter(model()[0], "weight", COLUMNS),
        lambda _: shardwise.nn.shard_parameter(model()[0], "height", ROWS),
    ),
    "a module": Verb(
        lambda given: given(PLAIN),
        lambda given: given(PLAIN.double()),
        lambda given: given(PLAIN[:, 1:]),
        sharded_model,
    ),
    "PartialTensor": Verb(
        lambda _: PartialTensor(PLAIN).redistribute(ROWS),
        lambda _: PartialTensor(PLAIN.int()).redistribute(ROWS),
        lambda _: PartialTensor(PLAIN).redistribute(WRONG),
    ),
    "ReplicatedTensor": Verb(
        lambda _: ReplicatedTensor(PLAIN).validate(), lambda _: ReplicatedTensor(PLAIN + 1).validate()
    ),
    "to_dtensor": Verb(
        lambda given: shardwise.to_dtensor(given[1], given[0]),
        lambda given: shardwise.to_dtensor(given[1].int(), given[0]),
        lambda given: shardwise.to_dtensor(given[1], WRONG),
        mesh,
    ),
    "from_dtensor": Verb(
        lambda given: shardwise.from_dtensor(shardwise.to_dtensor(given[1], given[0])),
        bad=lambda given: shardwise.from_dtensor(given[1]),
        given=mesh,
    ),
    "nn.init of replicas": Verb(
        lambda given: nn.init.normal_(given),
        lambda given: nn.init.normal_(given.double()),
        given=lambda: shard_tensor(PLAIN, shardwise.ReplicatedShardingSpec(PLACES)),
    ),
    "a plain operand, compared": Verb(
        lambda given: compared(given, 1), lambda given: compared(given, 2), lambda given: compared(given[:, :5], 1)
    ),
    "unscale_": Verb(lambda given: given[0].unscale_(given[1]), given=amp),
    "load_state_dict of a module": Verb(
        lambda given: given.load_state_dict({"0.weight": shard_tensor(PLAIN[:, :6], COLUMNS)}, strict=False),
        lambda given: given.load_state_dict({"0.weight": shard_tensor(PLAIN[:, :6], ROWS)}, strict=False),
        given=sharded_model,
    ),
    "full_state_dict": Verb(
        lambda given: full_state_dict(given.state_dict()),
        lambda given: full_state_dict({}),
        lambda given: misshaped(given[0].weight) is full_state_dict(given.state_dict()),
        sharded_model,
    ),
    "reshard_output": Verb(
        lambda given: shardwise.nn.reshard_output(given, COLUMNS)(shard_tensor(PLAIN, ROWS)),
        lambda given: shardwise.nn.reshard_output(given, chunks(1, 2, 1, 0))(shard_tensor(PLAIN, ROWS)),
        given=nn.ReLU,
    ),
    "fill_buffers": Verb(
        lambda given: shardwise.fill_buffers(given, buffered),
        bad=lambda given: shardwise.fill_buffers(given, lambda: WRONG / 0),
        given=buffered,
    ),
}


def filed(folder: str) -> dict[str, Verb]:
    """Those that need a folder, in which there is a checkpoint."""
    saved, new = f"{folder}/saved", f"{folder}/new"
    return {
        "save": Verb(
            lambda given: shardwise.save({"x": given}, new),
            lambda given: shardwise.save({"y": given}, new),
            lambda given: shardwise.save({"x": object}, new),
        ),
        "load": Verb(
            lambda given: shardwise.load({"x": given}, saved),
            lambda given: shardwise.load({"x": given.int()}, saved),
            lambda given: shardwise.load({"x": given}, new),
        ),
    }
