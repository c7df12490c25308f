"""`Unit`: a module whose parameters are gathered before it computes, and freed behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed import ProcessGroup

from shardwise.errors import PlanError
from shardwise.nn.fully_sharded.flat_memory import FlatMemory, FlatParameter, Recorded, Reduce
from shardwise.nn.fully_sharded.local_compute import (
    Arguments,
    LocalCompute,
    Watch,
    has_inner_hooks,
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
    ) -> None:
        """With a dtype, floating-point arguments are cast to it."""
        self._dtype = dtype
        self.path, self.module, self.memories, self._group = path, module, memories, group
        self._was_local = False  # in the last forward
        self.local = LocalCompute(path, module, group)
        self._calls: list[_Call] = []  # that are under way, one within another
        self.frozen_calls: WeakSet[Recorded] = WeakSet()  # recorded calls without parameters that want gradients

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

    def discard(self) -> None:
        """Forget what an interrupted step has left."""
        self._calls.clear()
        for memory in self.memories:
            memory.discard()

    @property
    def is_awaited(self) -> bool:
        """Whether the backward of a call is still to come, or to end."""
        return bool(self.frozen_calls) or any(memory.is_awaited for memory in self.memories)

    @property
    def wants_grad(self) -> bool:
        """Whether any parameter does."""
        return any(memory.wants_grad for memory in self.memories)

    @property
    def parameters(self) -> Iterator[FlatParameter]:
        """All of them."""
        return (one for memory in self.memories for one in memory.parameters)

    # Parameters of the module while it computes ----------------------------------------------------------------------

    def _put(self, values: Sequence[torch.Tensor]) -> None:
        for one, value in zip(self.parameters, values, strict=True):
            for slot in one.slots:
                put_parameter(slot.owner, slot.name, value)

    def restore(self) -> None:
        """The module has its sharded parameters."""
        self._put([one.sharded for one in self.parameters])

    def _views(self, reduce: Reduce, *, awaits: bool) -> list[torch.Tensor]:
        return [view for memory in self.memories for view in memory.views(reduce, awaits=awaits)]

    def _replicas(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gathered parameters as sharded tensors that every rank has whole, for ops on sharded tensors."""
        frames = (whole_frame(self._group, view.shape, view.dtype, view.device) for view in views)
        return [ShardedTensor._of_locals(frame, [view]) for frame, view in zip(frames, views, strict=True)]

    # A call ----------------------------------------------------------------------------------------------------------

    def enter(self, args: Any, kwargs: Any, reduce: Reduce) -> tuple[Any, Any]:
        """Put gathered parameters into the module. Gives the arguments that it is to be called with."""
        is_forward = current_backward() == -1
        if is_forward and not self._calls:
            self._require_own()
        args, kwargs = self._cast(args, kwargs)
        may_be_local = self.path and not has_inner_hooks(self.module)
        found = Arguments.of(self.module, self._group, args, kwargs) if may_be_local else None
        dims = None if found is None else self.local.result_dims(found)
        views = self._views(reduce, awaits=is_forward)
        untried = found is not None and self.local.is_untried(found) and is_forward
        self._calls.append(_Call(found, dims, self.local.watch() if untried else None))
        self._was_local = dims is not None and found is not None
        if dims is None or found is None:
            self._put(self._replicas(views))
            return (args, kwargs) if found is None else found.sharded()
        self._put(views)
        return found.local()

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

    def enter_backward(self, reduce: Reduce) -> None:
        """Put gathered parameters into the module as they were in the forward: activations may be recomputed within."""
        with torch.enable_grad():
            views = self._views(reduce, awaits=False)
        self._put(views if self._was_local else self._replicas(views))

    def leave(self, output: Any) -> Any:
        """Put the sharded parameters back. Gives the result of the call as sharded tensors."""
        call = self._calls.pop()
        if call.dims is not None and call.arguments is not None:
            output = wrapped(output, call.dims, call.arguments.cut)
        elif call.before is not None and call.arguments is not None:
            self.local.try_locally(call.arguments, output, call.before, self._run_locally)
        return output

    def is_running(self) -> bool:
        """Whether a call is under way."""
        return bool(self._calls)

    def abort(self) -> None:
        """A call has failed."""
        if self._calls:
            self._calls.pop()

    def _run_locally(self, *args: Any, **kwargs: Any) -> Any:
        self._put([view for memory in self.memories for view in memory.split()])
        return self.module.forward(*args, **kwargs)


class _Call:
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
