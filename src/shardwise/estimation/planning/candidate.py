"""`Candidate`: one way to train a model on some ranks, and what it would need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from shardwise.errors import PlanError
from shardwise.estimation.planning.work import Work, called
from shardwise.layout import Layout, Places
from shardwise.layout.geometry import Boxes
from shardwise.layout.placement import device_for
from shardwise.nn import shard_module
from shardwise.nn.fully_sharded import fully_shard
from shardwise.nn.fully_sharded.unit_choice import choose_units
from shardwise.nn.plans import tensor_parallel
from shardwise.nn.sharding_plan import ModuleTree
from shardwise.tensor import ShardedTensor
from shardwise.tensor.frame import Frame
from shardwise.torch_private import pytree

FULLY_SHARDED, REPLICATED, TENSOR_PARALLEL, MIXED = "fully sharded", "replicated", "tensor parallel", "mixed"
PLAIN = "plain"  # the model as it is, on one rank: nobody trains so, but every way computes at least this
SPARE = 0.02  # of the memory that a plan leaves free: a prediction is not exact


@dataclass(frozen=True)
class Candidate:
    """One way to train a model. Ranks are in rows: those of a row share each layer, and compute the same samples."""

    kind: str
    row: int  # ranks of a row; 1: each rank computes whole layers
    samples: tuple[int, ...]  # of each row
    weights: tuple[float, ...] | None  # which part of the states each row has; None: the same of all
    recompute: bool = False
    seconds: float = 0.0  # of a step
    needed: tuple[int, ...] = ()  # bytes, by rank
    memory: tuple[int, ...] = ()  # that the ranks have
    fits: bool = True
    reason: str = ""  # why it was not chosen, or was

    @property
    def name(self) -> str:
        """In words."""
        words = {
            TENSOR_PARALLEL: f"tensor parallel over {self.row}",
            MIXED: f"tensor parallel over {self.row}, fully sharded",
        }
        return words.get(self.kind, self.kind) + ", recomputed" * self.recompute

    @property
    def lacking(self) -> dict[int, int]:
        """By rank, the bytes that are missing for a plan that leaves some memory free."""
        pairs = enumerate(zip(self.needed, map(usable, self.memory), strict=True))
        return {rank: needed - memory for rank, (needed, memory) in pairs if needed > memory}

    def fullness(self, rank: int) -> float:
        """The part of its memory that a rank needs."""
        return self.needed[rank] / self.memory[rank]

    def fullest(self, ranks: Iterable[int]) -> int:
        """The one of these ranks that needs the largest part of its memory."""
        return max(ranks, key=self.fullness)

    def as_json(self) -> dict[str, Any]:
        """As JSON's types."""
        return asdict(self)

    @staticmethod
    def from_json(found: Any) -> Candidate:
        """Of what `as_json` gave; an error names what is missing."""
        if not isinstance(found, Mapping):
            raise PlanError(f"a plan is described by a JSON object; found {type(found).__name__}")
        missing = [name for name in ("kind", "row", "samples") if name not in found]
        if missing:
            raise PlanError(f"the plan says nothing of {' and '.join(map(repr, missing))}")
        if found["kind"] not in (FULLY_SHARDED, REPLICATED, TENSOR_PARALLEL, MIXED):
            raise PlanError(f"there is no kind of plan {found['kind']!r:.80}")
        weights = found.get("weights")
        return Candidate(
            found["kind"],
            int(found["row"]),
            tuple(map(int, found["samples"])),
            None if weights is None else tuple(map(float, weights)),
            bool(found.get("recompute", False)),
        )

    # Doing it ---------------------------------------------------------------------------------------------------------

    def apply(self, model: nn.Module) -> nn.Module:
        """Shard a model in this way, in place. Every rank of the world calls it."""
        ranks = dist.get_world_size()
        if len(self.samples) * self.row != ranks:
            raise PlanError(f"this plan is for {len(self.samples) * self.row} ranks, and the world has {ranks}")
        kind = device_for(_device_of(model), _world())
        if self.recompute:
            recompute_blocks(model)
        if self.kind == PLAIN:
            return model
        if self.kind == TENSOR_PARALLEL:
            return shard_module(model, tensor_parallel(model))
        weights = None if self.weights is None or len(set(self.weights)) == 1 else list(self.weights)
        if self.kind == REPLICATED:
            return fully_shard(
                model, mesh=DeviceMesh(kind, np.arange(ranks)[:, None].tolist(), mesh_dim_names=("dp", "one"))
            )
        if self.kind == FULLY_SHARDED:
            return fully_shard(model, weights=weights)
        rows = np.arange(ranks).reshape(-1, self.row).tolist()
        mesh = DeviceMesh(kind, rows, mesh_dim_names=("dp", "tp"))
        shard_module(model, tensor_parallel(model, mesh["tp"]))
        return fully_shard(model, mesh=mesh["dp"], weights=weights)

    def cut(self, batch: Any) -> Any:
        """The samples of a batch, which all ranks have, to the ranks that compute them."""
        if self.kind in (PLAIN, TENSOR_PARALLEL):
            return batch
        return pytree.tree_map(lambda one: _cut(one, self.samples, self.row), batch)


def usable(memory: int) -> int:
    """The bytes of a memory that a plan may use."""
    return int((1 - SPARE) * memory)


def set_up(model: nn.Module, candidate: Candidate, work: Work) -> Callable[[], None]:
    """Everything that is needed for steps, as each rank has it; gives a function that takes one."""
    return Training(model, candidate, work).step_on(candidate.samples)


class Training:
    """A sharded model that takes steps, as each rank has it."""

    def __init__(self, model: nn.Module, candidate: Candidate, work: Work) -> None:
        """Shard the model as the candidate says, in place."""
        model = model if work.dtype is None else model.to(work.dtype)
        self._model, self._candidate, self._work = candidate.apply(model.train()), candidate, work
        self._optimizer = work.optimizer([one for one in self._model.parameters() if one.requires_grad])

    def step_on(self, samples: tuple[int, ...]) -> Callable[[], None]:
        """A function that takes a step with so many samples of each row."""
        batch = replace(self._candidate, samples=samples).cut(self._work.batch(sum(samples)))

        def step() -> None:
            self._work.loss(called(self._model, batch)).backward()  # type: ignore[no-untyped-call] # torch's
            self._optimizer.step()
            self._optimizer.zero_grad()

        return step


def recompute_blocks(model: nn.Module) -> None:
    """Let each block of a model keep its arguments alone, and compute again what its backward needs.

    A model that knows how to do it does it itself: those of transformers leave out their caches of keys and values.
    """
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is not None and getattr(model, "supports_gradient_checkpointing", False):
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    for choice in choose_units(ModuleTree(model), None):
        if choice.path:
            _recompute(choice.module)


def _recompute(module: nn.Module) -> None:
    forward = module.forward

    def again(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = again


def _cut(tensor: torch.Tensor, samples: Sequence[int], row: int) -> ShardedTensor:
    """Rows of a tensor, each to the ranks of a row; every rank has the tensor."""
    group, rest = _world(), list(tensor.shape[1:])
    ends = np.cumsum(samples).tolist()
    firsts = [end - count for end, count in zip(ends, samples, strict=True) for _ in range(row)]
    counts = [count for count in samples for _ in range(row)]
    boxes = Boxes.parse(
        [[first, *[0] * len(rest)] for first in firsts], [[count, *rest] for count in counts], 1 + len(rest)
    )
    kind = device_for(tensor.device.type, group)
    layout = Layout.of(tensor.shape, boxes, Places.on_ranks(np.arange(len(counts)), kind))
    rank = dist.get_rank()
    frame = Frame.of(layout, None, tuple(layout.rows_on(rank)), tensor.dtype, group)
    local = tensor[firsts[rank] : firsts[rank] + counts[rank]]
    return ShardedTensor._of_locals(frame, [local.to(frame.device)])


def _device_of(model: nn.Module) -> str:
    return next((one.device.type for one in model.parameters()), "cpu")


def _world() -> Any:
    return dist.group.WORLD
