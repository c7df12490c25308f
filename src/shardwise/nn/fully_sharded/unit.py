"""`Unit`: a module whose parameters are gathered before it computes, and freed behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from shardwise import settings
from shardwise.errors import PlanError
from shardwise.nn.fully_sharded.flat_memory import FlatMemory, FlatParameter, Reduce
from shardwise.nn.fully_sharded.local_compute import (
    Arguments,
    LocalCompute,
    Watch,
    has_inner_hooks,
    has_plain_parameters,
    whole_frame,
    wrapped,
)
from shardwise.tensor import ShardedTensor
from shardwise.torch_private import current_backward, pytree

WEIGHTS_OF_RNN = "_flat_weights"  # the attribute in which torch's RNNs keep their parameters, in order


class Unit:
    """One unit of a model."""

    def __init__(
        self,
        path: str,
        module: nn.Module,
        memories: Sequence[FlatMemory],
        group: ProcessGroup,
        dtype: torch.dtype | None,
        *,
        may_compute_locally: bool,
    ) -> None:
        """With a dtype, floating-point arguments are cast to it."""
        self._dtype, self._may_compute_locally = dtype, may_compute_locally
        self.path, self.module, self.memories, self._group = path, module, memories, group
        self._has_views = False  # whether gathered parameters are in the module
        self.leaves_tensors = False  # whether what it computes leaves it otherwise than by its result
        self._has_others = False  # plain parameters, whose gradients ops on sharded tensors add up
        self.local = LocalCompute(path, module, group)
        self.calls: list[UnitCall] = []  # that are under way, one within another
        self.in_backward: UnitCall | None = None  # whose backward came last
        self._in_graph: list[list[list[Any]]] = []  # parameters of calls that are traced, one within another
        self.open = 0  # memories that are still to get gradients in the backward of a call

    # Memory ----------------------------------------------------------------------------------------------------------

    def begin_gathering(self) -> None:
        """Begin to gather all parameters."""
        for memory in self.memories:
            memory.begin_gathering()

    def gather(self) -> None:
        """Have all parameters."""
        self.begin_gathering()
        for memory in self.memories:
            memory.gather()

    def free(self) -> None:
        """Give the memory of gathered parameters back."""
        for memory in self.memories:
            memory.free()

    def refresh(self) -> None:
        """Before a forward: forget what is gathered, for parameters may have other values and other memory now."""
        self.calls.clear()
        for memory in self.memories:
            memory.discard()
            memory.adopt()

    @property
    def parameters(self) -> Iterator[FlatParameter]:
        """All of them."""
        return (one for memory in self.memories for one in memory.parameters)

    # Parameters of the module while it computes ----------------------------------------------------------------------

    def _put(self, values: Sequence[torch.Tensor]) -> None:
        for one, value in zip(self.parameters, values, strict=True):
            for slot in one.slots:
                put_parameter(slot.owner, slot.name, value)
        self._has_views = True

    def restore(self) -> None:
        """The module has its sharded parameters."""
        if self._has_views:
            self._put([one.sharded for one in self.parameters])
        self._has_views = False

    def _views(self, reduce: Reduce) -> list[torch.Tensor]:
        return [view for memory in self.memories for view in memory.views(reduce)]

    def _replicas(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gathered parameters for ops on sharded tensors: every rank has them whole, or as another plan cut them."""
        made: list[torch.Tensor] = []
        left = iter(views)
        for one in self.parameters:
            locals_ = [next(left) for _ in one.entries]
            frame = one.gathered
            if frame is None:
                frame = whole_frame(self._group, locals_[0].shape, locals_[0].dtype, locals_[0].device)
            replica = ShardedTensor._of_locals(frame, locals_)
            replica._is_activation = False
            made.append(replica)
        return made

    # A call ----------------------------------------------------------------------------------------------------------

    def enter(self, args: Any, kwargs: Any, reduce: Reduce) -> tuple[Any, Any]:
        """Put gathered parameters into the module. Gives the arguments that it is to be called with."""
        is_forward = current_backward() == -1
        if is_forward and not self.calls:
            self._require_own()
            self._has_others = bool(self.path) and has_plain_parameters(self.module)
        args, kwargs = self._cast(args, kwargs)
        watched = has_inner_hooks(self.module)
        self.leaves_tensors = self.leaves_tensors or (watched and bool(self.path))
        is_candidate = self.path and not watched and not self._has_others and self._may_compute_locally
        found = Arguments.of(self.module, self._group, args, kwargs) if is_candidate else None
        dims = None if found is None else self.local.result_dims(found)
        views = self._views(reduce)
        untried = found is not None and self.local.is_untried(found) and is_forward
        self.calls.append(UnitCall(found, dims, self.local.watch(found) if found is not None and untried else None))
        if dims is None or found is None:
            self._put(self._replicas(views))
            return (args, kwargs) if found is None else found.sharded()
        self._put(views)
        return found.local()

    def enter_in_graph(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The same while a compiler traces: what is gathered, and the sums of gradients, are ops of its graph."""
        now = [[slot.owner._parameters[slot.name] for slot in one.slots] for one in self.parameters]
        self._in_graph.append(now)
        rest = iter(now)
        views = [
            view
            for memory in self.memories
            for view in memory.views_in_graph([next(rest)[0] for _ in memory.parameters])
        ]
        self._put(self._replicas(views))
        return self._cast(args, kwargs)

    def leave_in_graph(self) -> None:
        """Put back the parameters that the module had before."""
        for one, before in zip(self.parameters, self._in_graph.pop(), strict=True):
            for slot, value in zip(one.slots, before, strict=True):
                put_parameter(slot.owner, slot.name, value)
        self._has_views = False

    def _cast(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments in the dtype of gathered parameters, where another one was asked for."""
        if self._dtype is None:
            return args, kwargs

        def cast(leaf: Any) -> Any:
            floats = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            return leaf.to(self._dtype) if floats else leaf

        found: tuple[Any, Any] = pytree.tree_map(cast, (args, kwargs))
        return found

    def _require_own(self) -> None:
        for one in self.parameters:
            for slot in one.slots:
                now: Any = slot.owner._parameters.get(slot.name)
                if now is not one.sharded:
                    raise PlanError(
                        f"{slot} was replaced after fully_shard: change its values in place, or shard the model again"
                    )

    def enter_backward(self, call: UnitCall, reduce: Reduce) -> None:
        """Put gathered parameters into the module as they were in a call: activations may be recomputed within."""
        self.in_backward = call
        with torch.enable_grad():
            views = self._views(reduce)
        self._put(views if call.dims is not None else self._replicas(views))
        self.open = sum(memory.wants_grad for memory in self.memories)

    def leave(self, output: Any) -> Any:
        """Put the sharded parameters back. Gives the result of the call as sharded tensors."""
        call = self.calls.pop()
        if call.dims is not None and call.arguments is not None:
            output = wrapped(output, call.dims, call.arguments.cut)
        elif call.before is not None and call.arguments is not None:
            after = self.local.watch(call.arguments)
            self.leaves_tensors = self.leaves_tensors or after.attributes != call.before.attributes
            run = self._run_locally if after == call.before else None
            self.local.try_locally(call.arguments, output, run)
        call.arguments = None  # a graph refers to the call: no tensor may lead back to the graph
        return output

    def is_running(self) -> bool:
        """Whether a call is under way."""
        return bool(self.calls)

    def is_tried(self) -> bool:
        """Whether the call under way is to tell if the unit may compute on local samples."""
        return bool(self.calls) and self.calls[-1].before is not None

    def abort(self) -> None:
        """A call has failed."""
        if self.calls:
            self.calls.pop().arguments = None

    def _run_locally(self, *args: Any, **kwargs: Any) -> Any:
        self._put([view for memory in self.memories for view in memory.split()])
        with settings.changed(compares_first=False):  # weights of other units are sharded, beside samples of one rank
            forward = self.module.forward
            return getattr(forward, "uncompiled", forward)(*args, **kwargs)


class UnitCall:
    """A call of a unit that is under way."""

    def __init__(self, arguments: Arguments | None, dims: tuple[int | None, ...] | None, before: Watch | None) -> None:
        self.arguments, self.dims, self.before = arguments, dims, before


def put_parameter(owner: nn.Module, name: str, value: Any) -> None:
    """Let a module have this value as its parameter, whatever it is; layers of RNNs keep lists of theirs."""
    owner._parameters[name] = value
    if isinstance(owner, nn.RNNBase):
        vars(owner)[WEIGHTS_OF_RNN] = list(owner._parameters.values())


def hook_tensors(nest: Any, hook: Callable[[torch.Tensor], None]) -> bool:
    """Call a hook when the gradient of any tensor in a nest is there. Gives whether there is such a tensor."""
    found = False
    for leaf in pytree.tree_flatten(nest)[0]:
        if isinstance(leaf, ShardedTensor):
            anchor = leaf._anchored()
            tensors = leaf._local_tensors() if anchor is None else [anchor]
        else:
            tensors = [leaf] if isinstance(leaf, torch.Tensor) else []
        for tensor in tensors:
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(hook)  # type: ignore[no-untyped-call] # torch's
                found = True
    return found
