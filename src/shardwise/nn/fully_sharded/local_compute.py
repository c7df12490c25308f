"""Whether a unit treats samples one by one, so that it may compute on this rank's plain samples; and how it does.

Ops on sharded tensors are right for any unit, and cost host time for each. A unit that makes of every sample what it
would make of the sample alone may run on plain local tensors instead. That is tried when a unit is first called in
some way (with which kinds of arguments, and which plain values as attributes of its modules, such as ``training``): the
unit runs on the sharded tensors; if it sent nothing, drew nothing and changed no buffer and no attribute, it runs again
on the local tensors, without recording. If both give the same values on every rank, later calls of that kind run on
local tensors; not while there are hooks on modules within, which would see samples of one rank.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.autograd.versions import write_mark
from shardwise.comm.agreement import in_step_sharing
from shardwise.comm.group import Fields, cached_per_group, group_state, rank_array, without_data
from shardwise.comm.tracing import record
from shardwise.layout import Layout, Places
from shardwise.layout.geometry import Boxes
from shardwise.layout.specs import FixedShardingSpec
from shardwise.ops.attention import Documents
from shardwise.tensor import ShardedTensor
from shardwise.tensor.frame import Frame
from shardwise.tensor.redistribution_cache import writes_of
from shardwise.torch_private import FakeTensor, is_any_autocast_enabled, pytree, unset_fake_mode

SCALARS = {bool, int, float, str, type(None)}
VALUES = (bool, int, float, str, type(None), torch.dtype, torch.device)  # arguments that are compared by value


@dataclass(frozen=True)
class BatchCut:
    """How samples lie: how many each rank of the group has, in order, and on which devices."""

    sizes: tuple[int, ...]
    places: Places
    group: ProcessGroup

    def frame(self, local: torch.Tensor, dim: int) -> Frame:
        """Of the tensor of all samples, of which this rank has these along a dim; or that every rank has whole."""
        if dim == REPLICA:
            return whole_frame(self.group, local.shape, local.dtype, local.device)
        rest = (*local.shape[:dim], *local.shape[dim + 1 :])
        return _frame(self.group, self.sizes, self.places, rest, dim, local.dtype)


@cached_per_group(maxsize=1024)
def whole_frame(group: ProcessGroup, size: torch.Size, dtype: torch.dtype, device: torch.device) -> Frame:
    """Of a tensor that every rank of the group has whole."""
    layout = Layout.whole(size, Places.on_ranks(rank_array(group), device.type))
    return Frame.of(layout, None, layout.rows_on(dist.get_rank()), dtype, group)


@cached_per_group(maxsize=1024)
def _frame(
    group: ProcessGroup, sizes: tuple[int, ...], places: Places, rest: tuple[int, ...], dim: int, dtype: torch.dtype
) -> Frame:
    lengths = np.array(sizes, dtype=np.int64)
    extents = np.insert(np.tile(np.array(rest, dtype=np.int64), (len(sizes), 1)), dim, lengths, axis=1)
    offsets = np.zeros_like(extents)
    offsets[:, dim] = np.cumsum(lengths) - lengths
    layout = Layout.of((*rest[:dim], int(lengths.sum()), *rest[dim:]), Boxes(offsets, extents), places)
    return Frame.of(layout, None, layout.rows_on(dist.get_rank()), dtype, group)


@cached_per_group(maxsize=1024)
def batch_cut(group: ProcessGroup, layout: Layout) -> tuple[int, BatchCut] | None:
    """The dim along which each rank has samples of its own, in the order of the group; None of any other layout."""
    ranks = rank_array(group)
    if len(layout) != len(ranks) or not np.array_equal(layout.ranks, ranks) or not layout.ndim:
        return None
    boxes = layout.boxes
    cut = [dim for dim in range(layout.ndim) if not (boxes.sizes[:, dim] == layout.size[dim]).all()]
    if len(cut) > 1 or (not cut and len(ranks) > 1):
        return None
    dim = cut[0] if cut else 0
    sizes = boxes.sizes[:, dim]
    if not np.array_equal(boxes.offsets[:, dim], np.cumsum(sizes) - sizes):
        return None
    return dim, BatchCut(tuple(sizes.tolist()), layout.places, group)


REPLICA = -1  # instead of a dim: every rank has the tensor whole


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call: what lies in them, and which of it are samples."""

    leaves: list[Any]
    structure: Any
    dims: list[int | None]  # of each leaf that is a sharded tensor, the dim of the samples
    cut: BatchCut
    kind: tuple[Any, ...]  # equal for calls that compute alike

    @staticmethod
    def of(module: nn.Module, group: ProcessGroup, args: Any, kwargs: Mapping[str, Any]) -> Arguments | None:
        """None where no argument has samples of each rank's own, or an argument may hold anything.

        Every rank of the group calls it: a tensor of all samples that lies otherwise is moved to the ranks of these.
        """
        leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
        if not all(isinstance(leaf, (torch.Tensor, *VALUES)) for leaf in leaves):
            return None
        if any(isinstance(leaf, Documents) for leaf in leaves):  # positions in a sequence of all ranks
            return None
        sharded = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]
        if any(leaf._process_group is not group for leaf in sharded):
            return None
        found = next(filter(None, (batch_cut(group, leaf._layout) for leaf in sharded)), None)
        if found is None:
            return None
        dims: list[int | None] = []
        traits: list[Any] = []
        for number, leaf in enumerate(leaves):
            dim = None
            if isinstance(leaf, ShardedTensor):
                dim = _dim_of(leaf, found[1])
                if dim is None:
                    dim, leaves[number] = found[0], _moved(leaf, *found)
                if leaves[number] is None:
                    return None
            traits.append(_traits(leaf, dim, sum(found[1].sizes)))
            dims.append(dim)
        mode = torch.is_grad_enabled(), is_any_autocast_enabled(), settings_of(module)
        return Arguments(leaves, structure, dims, found[1], (mode, structure, tuple(traits)))

    def sharded(self) -> tuple[Any, dict[str, Any]]:
        """The same arguments, of which all samples lie on the same ranks."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self.structure)
        return args, kwargs

    def local(self) -> tuple[Any, dict[str, Any]]:
        """The same arguments with this rank's samples."""
        leaves = [
            leaf if dim is None else leaf._local_tensors()[0] for leaf, dim in zip(self.leaves, self.dims, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        return args, kwargs


def _traits(leaf: Any, dim: int | None, samples: int) -> Any:
    """What calls of one kind have in common of an argument: of plain tensors also which sizes broadcast, or are all
    samples; of floats, such as a rate, that they are floats."""
    if not isinstance(leaf, torch.Tensor):
        return float if isinstance(leaf, float) else leaf
    sizes = () if dim is not None else tuple(size if size in (1, samples) else 0 for size in leaf.shape)
    return dim, type(leaf), leaf.ndim, leaf.dtype, sizes


def _dim_of(tensor: ShardedTensor, cut: BatchCut) -> int | None:
    """The dim along which a tensor has these samples; `REPLICA` if every rank has it whole; None of other layouts."""
    layout = tensor._layout
    if layout.is_whole_everywhere and np.array_equal(layout.ranks, cut.places.ranks):
        return REPLICA
    found = batch_cut(cut.group, layout)
    return found[0] if found is not None and found[1] == cut else None


_moved_leaves = WeakIdKeyDictionary()  # tensor → where it was moved to, and the tensor there


def _moved(tensor: ShardedTensor, dim: int, cut: BatchCut) -> ShardedTensor | None:
    """A tensor of all samples on the ranks that have the samples, such as a mask; None where it has none along the dim.

    Without gradients it is moved once for all units.
    """
    if tensor.ndim <= dim or tensor.shape[dim] != sum(cut.sizes):
        return None
    known: Any = _moved_leaves.get(tensor)  # type: ignore[no-untyped-call] # torch's
    if known is not None and known[0] == cut and known[1] == writes_of(tensor)[0]:
        return cast(ShardedTensor, known[2])
    rest = (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
    frame = _frame(cut.group, cut.sizes, cut.places, rest, dim, tensor.dtype)
    moved = tensor._redistributed(FixedShardingSpec.of(frame.layout))
    if not tensor.requires_grad:
        _moved_leaves[tensor] = cut, writes_of(tensor)[0], moved
    return moved


def settings_of(module: nn.Module) -> tuple[Any, ...]:
    """The plain values that a module and its submodules have as attributes: what a forward may decide by."""
    return tuple(tuple(value for value in vars(one).values() if value.__class__ in SCALARS) for one in module.modules())


def has_inner_hooks(module: nn.Module) -> bool:
    """Whether somebody watches what is computed within a module, and would see samples of one rank."""
    return any(
        one._forward_hooks or one._forward_pre_hooks or one._backward_hooks or one._backward_pre_hooks
        for one in module.modules()
        if one is not module
    )


def has_plain_parameters(module: nn.Module) -> bool:
    """Whether a module has parameters that are not sharded, as of an adapter, and want the gradients of all ranks."""
    return any(
        value is not None and value.requires_grad and not isinstance(value, ShardedTensor)
        for one in module.modules()
        for value in one._parameters.values()
    )


class LocalCompute:
    """What is known of a unit: for each kind of call, along which dims its results have the samples, if it is local."""

    def __init__(self, path: str, module: nn.Module, group: ProcessGroup) -> None:
        self._path, self._module, self._group = path, module, group
        self._known: dict[tuple[Any, ...], tuple[int | None, ...] | None] = {}
        self._found: dict[tuple[Any, ...], tuple[int | None, ...] | None] = {}  # in this step: known from the next on

    def result_dims(self, arguments: Arguments) -> tuple[int | None, ...] | None:
        """The dims of the results if the call may be local; None if it may not, or was not tried."""
        return self._known.get(arguments.kind)

    def is_untried(self, arguments: Arguments) -> bool:
        """Whether it is not known yet, and can be tried: where one rank has all samples, all units give the same."""
        if arguments.kind in self._known or arguments.kind in self._found:
            return False
        sizes = arguments.cut.sizes
        return len(sizes) == 1 or sum(size > 0 for size in sizes) > 1

    def begin_step(self) -> None:
        """What was found in earlier steps holds from now on. No backward may be left that recomputes otherwise."""
        self._known |= self._found
        self._found = {}

    def watch(self, arguments: Arguments) -> Watch:
        """What must stay as it is while the unit runs on sharded tensors, for it to be tried on local ones."""
        return Watch.now(self._module, self._group, arguments)

    def try_locally(self, arguments: Arguments, output: Any, run: Callable[..., Any] | None) -> None:
        """Find out whether calls of this kind may be local, given what the unit made of the sharded tensors.

        Every rank of the group calls it. ``run`` is the unit with plain parameters; None where it must not run again.
        """
        dims = None if run is None else _sample_dims(output, arguments.cut)

        def work() -> tuple[None, Fields, bool]:
            alike = dims is not None and run is not None and self._gives_the_same(arguments, output, run)
            return None, {"verb": f"try {self._path or 'the model'} on local samples"}, alike

        told = in_step_sharing(self._group, work)[1]
        self._found[arguments.kind] = dims if all(told.kinds) else None

    def _gives_the_same(self, arguments: Arguments, output: Any, run: Callable[..., Any]) -> bool:
        args, kwargs = arguments.local()
        try:
            with torch.no_grad():
                found = run(*args, **kwargs)
        except Exception:  # a unit that needs all samples may fail in any way
            return False
        expected = pytree.tree_flatten(output)[0]
        leaves = pytree.tree_flatten(found)[0]
        return len(leaves) == len(expected) and all(map(_is_same, leaves, expected))


@dataclass(frozen=True)
class Watch:
    """What a unit that treats samples one by one leaves as it was."""

    sent: int  # calls of the group that sent something
    noise: bytes  # states of generators
    buffers: tuple[int | str, ...]  # what changes when they are written to
    attributes: tuple[Any, ...]  # which values modules have, and how many are in them
    written: tuple[int | str, ...]  # the same of the arguments

    @staticmethod
    def now(module: nn.Module, group: ProcessGroup, arguments: Arguments) -> Watch:
        """As it is now."""
        tensors = [leaf for leaf in pytree.tree_flatten(arguments.local())[0] if isinstance(leaf, torch.Tensor)]
        return Watch.of(module, tensors, group_state(group).history.sent + record.foreseen_collectives())

    @staticmethod
    def of(module: nn.Module, tensors: Sequence[torch.Tensor], sent: int = 0) -> Watch:
        """Of a call with these tensors."""
        with unset_fake_mode():
            states = torch.get_rng_state().numpy().tobytes()
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch's
                states += torch.cuda.get_rng_state().numpy().tobytes()
        buffers = tuple(map(write_mark, module.buffers()))
        numbers: Any = np.random.get_state(legacy=False)  # whatever a unit draws by
        drawn = random.getstate(), numbers["state"]["pos"], numbers["state"]["key"].tobytes()
        noise = states + repr(drawn).encode()
        attributes = tuple(
            (name, id(value), len(value) if isinstance(value, list | dict | set) else 0)
            for one in module.modules()
            for name, value in vars(one).items()
            if not name.startswith("_") and name != "forward"  # which a compiler may have replaced
        )
        written = tuple(map(write_mark, tensors))
        return Watch(sent, noise, buffers, attributes, written)


def _sample_dims(output: Any, cut: BatchCut) -> tuple[int | None, ...] | None:
    """Of each tensor in a result the dim of the samples, None of what is no tensor; None if one has other samples."""
    dims: list[int | None] = []
    for leaf in pytree.tree_flatten(output)[0]:
        dim = None
        if isinstance(leaf, ShardedTensor):
            dim = _dim_of(leaf, cut) if leaf._process_group is cut.group else None
            if dim is None:
                return None
        elif not isinstance(leaf, VALUES):
            return None
        dims.append(dim)
    return tuple(dims) if any(dim is not None for dim in dims) else None


def _is_same(found: Any, expected: Any) -> bool:
    if not isinstance(expected, ShardedTensor):
        return bool(found == expected)
    local = expected._local_tensors()[0]
    if type(found) not in (torch.Tensor, FakeTensor) or found.shape != local.shape or found.dtype != local.dtype:
        return False
    if without_data():
        return True
    try:
        torch.testing.assert_close(found, local.detach(), equal_nan=True)
    except AssertionError:
        return False
    return True


def wrapped(output: Any, dims: Sequence[int | None], cut: BatchCut) -> Any:
    """A result on local samples as one of sharded tensors."""
    leaves, structure = pytree.tree_flatten(output)
    made = [
        leaf if dim is None else ShardedTensor._of_locals(cut.frame(leaf, dim), [leaf])
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    return pytree.tree_unflatten(made, structure)
