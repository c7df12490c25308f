"""`BlockSamples`: the samples of this rank for a module that has a list of experts, and its result as it was given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise import settings
from shardwise.autograd.replicas import recorded
from shardwise.errors import PropertyError
from shardwise.layout.specs import spec_of
from shardwise.nn.fully_sharded.local_compute import REPLICA, Arguments, BatchCut, batch_cut
from shardwise.ops.engine.chunking import group_chunks
from shardwise.ops.engine.compute import assemble, result_frame
from shardwise.ops.engine.plain_operand import cut_plain
from shardwise.tensor import ShardedTensor
from shardwise.tensor.dispatch import Distributed
from shardwise.tensor.movement import full_tensor
from shardwise.torch_private import pytree


@dataclass(frozen=True)
class ResultDim:
    """The dim of a result that has the samples: alone, or together with so many dims that follow in the input."""

    dim: int
    merged: int


Results = tuple[ResultDim | None, ...]  # for each tensor or value in a result; None of one that is no tensor


@dataclass(frozen=True)
class BlockSamples:
    """The arguments of one call: what lies in them, and this rank's samples of it."""

    leaves: list[Any]  # as given
    locals: list[Any]  # with this rank's samples
    structure: Any
    dims: list[int | None]  # of each leaf that has samples, their dim
    cut: BatchCut | None  # None of each rank's own plain samples
    kind: tuple[Any, ...]

    @staticmethod
    def of(module: Any, model: ShardedTensor, args: Any, kwargs: Mapping[str, Any]) -> BlockSamples:
        """Of a call; ``model`` is a parameter of the experts. Every rank of its group calls it.

        Sharded samples stay on their ranks if each has its own, in order. Of others, and of plain ones, which are the
        same on every rank, each rank computes an even part.
        """
        leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
        group = model._process_group
        if any(isinstance(one, Distributed) and not isinstance(one, ShardedTensor) for one in leaves):
            raise PropertyError("a module with a list of experts takes plain or sharded tensors")
        first = next((k for k, one in enumerate(leaves) if isinstance(one, torch.Tensor) and one.ndim > 1), None)
        if first is None:
            raise PropertyError("a module with a list of experts takes samples of two dims or more, found none")
        if settings.current().own_batches and not any(isinstance(one, ShardedTensor) for one in leaves):
            dims = [0 if isinstance(one, torch.Tensor) and one.ndim else None for one in leaves]
            kind = ("own", structure, tuple(getattr(one, "dtype", type(one)) for one in leaves))
            return BlockSamples(leaves, leaves, structure, dims, None, kind)
        placed = [*leaves]
        if not any(isinstance(one, ShardedTensor) and batch_cut(group, one._layout) for one in leaves):
            count = len(leaves[first])
            for number, one in enumerate(leaves):
                if isinstance(one, torch.Tensor) and one.ndim and len(one) == count:
                    placed[number] = _chunked(one, model)
        args, kwargs = pytree.tree_unflatten(placed, structure)
        found = Arguments.of(module, group, args, kwargs)
        if found is None:
            raise PropertyError(
                "a module with a list of experts takes samples in the experts' process group, cut along one dim, "
                "beside plain values; found " + ", ".join(type(one).__name__ for one in leaves)
            )
        local = [one if dim is None else recorded(one)[0][0] for one, dim in zip(found.leaves, found.dims, strict=True)]
        return BlockSamples(leaves, local, structure, found.dims, found.cut, found.kind)

    @property
    def are_own(self) -> bool:
        """Whether plain samples are each rank's own."""
        return self.cut is None

    @property
    def first(self) -> int:
        """The number of the leaf that says what a sample is."""
        return next(k for k, dim in enumerate(self.dims) if dim is not None and dim != REPLICA)

    @property
    def trailing(self) -> tuple[int, ...]:
        """The sizes of the dims that follow that of the samples."""
        dim = self.dims[self.first]
        assert dim is not None
        return tuple(self.locals[self.first].shape[dim + 1 :])

    @property
    def count(self) -> int:
        """How many samples this rank has."""
        dim = self.dims[self.first]
        assert dim is not None
        return int(self.locals[self.first].shape[dim])

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for calls that compute alike."""
        return self.kind, tuple(size == 1 for size in self.trailing)

    def local(self) -> tuple[Any, dict[str, Any]]:
        """The arguments with this rank's samples."""
        args, kwargs = pytree.tree_unflatten(self.locals, self.structure)
        return args, kwargs

    def tensors(self) -> list[torch.Tensor]:
        """Those of this rank's samples."""
        return [one for one in self.locals if isinstance(one, torch.Tensor)]

    def with_others(self, made: Callable[[torch.Tensor], torch.Tensor]) -> BlockSamples:
        """With as many samples more, made of these, behind them."""
        leaves = [
            torch.cat([one, made(one)], dim) if dim is not None and dim != REPLICA else one
            for one, dim in zip(self.locals, self.dims, strict=True)
        ]
        return replace(self, locals=leaves)

    def wrapped(self, output: Any, results: Results, anchor: torch.Tensor | None) -> Any:
        """A result on this rank's samples in the form of what was given. Every rank calls it."""
        leaves, structure = pytree.tree_flatten(output)
        made = []
        for leaf, where in zip(leaves, results, strict=True):
            floats = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            tied = anchored(leaf, anchor) if floats and anchor is not None else leaf
            made.append(tied if where is None or self.cut is None else self._wrapped(tied, where, anchor))
        return pytree.tree_unflatten(made, structure)

    def _wrapped(self, leaf: torch.Tensor, where: ResultDim, anchor: torch.Tensor | None) -> Any:
        assert self.cut is not None
        factor = math.prod(self.trailing[: where.merged])
        cut = replace(self.cut, sizes=tuple(size * factor for size in self.cut.sizes))
        frame = cut.frame(leaf, where.dim)
        made = assemble(ShardedTensor, frame, [leaf], [], anchor is not None)
        assert isinstance(made, ShardedTensor)
        given = self.leaves[self.first]
        if not isinstance(given, ShardedTensor):
            return full_tensor(made, in_op=True)
        same = made.shape == given.shape and made._layout != given._layout
        return made._redistributed(spec_of(given._layout)) if same else made


def _chunked(tensor: Any, model: ShardedTensor) -> ShardedTensor:
    """A tensor in even chunks of its first dim; of a plain one, each rank takes its part."""
    layout = group_chunks(tensor.shape, 0, model)
    if isinstance(tensor, ShardedTensor):
        return tensor._redistributed(spec_of(layout))
    group = model._process_group
    frame = result_frame(layout, tensor.dtype, group)
    if torch.is_grad_enabled() and tensor.requires_grad:
        *parts, anchor = cut_plain(tensor, layout, group)
        made = assemble(ShardedTensor, frame, parts, [anchor], True)
    else:
        made = assemble(ShardedTensor, frame, [tensor[layout.index(row)] for row in frame.rows], [], False)
    assert isinstance(made, ShardedTensor)
    return made


class _Anchored(torch.autograd.Function):
    """The same tensor, whose backward also reaches an anchor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        """A view."""
        ctx.save_for_backward(anchor)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Zeros for the anchor."""
        return grads[0], torch.zeros_like(ctx.saved_tensors[0])


anchored: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _Anchored.apply
