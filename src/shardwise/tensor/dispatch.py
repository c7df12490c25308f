"""Which function handles which op: a user's override, then one for the spec's class, then the built-in one.

A handler is called as ``handler(types, args, kwargs, process_group)``.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwise.comm.group import group_state, is_forked_from_rank
from shardwise.errors import (
    CollectiveOpError,
    MixedOperandsError,
    NoAttributeError,
    NoDistributedTensorError,
    ProcessGroupError,
    PropertyError,
    SignatureError,
    UnsupportedOpError,
)
from shardwise.torch_private import DisableTorchFunction, pytree

Op = Callable[..., Any]
Handler = Callable[..., Any]
Table = dict[Op, Handler]


class Distributed:
    """Marks tensor classes whose data lies on the ranks of a process group."""

    _process_group: Any


class Registry:
    """Three tables of handlers, searched in order; and functions of upper layers that lower layers call."""

    def __init__(self) -> None:
        self.verbs: dict[str, Callable[..., Any]] = {}
        self.overrides: Table = {}
        self.by_spec: dict[type, Table] = {}
        self.built_in: Table = {}
        self.version = 0  # how often a handler was registered

    def find(self, op: Op, spec_class: type) -> Handler | None:
        """The handler for this op on a tensor with a spec of this class."""
        if self.overrides and op in self.overrides:
            return self.overrides[op]
        if self.by_spec:
            handler = self.find_for_spec(op, spec_class)
            if handler is not None:
                return handler
        return self.built_in.get(op)

    def find_for_spec(self, op: Op, spec_class: type) -> Handler | None:
        """The handler registered for this class of specs or the nearest of its bases."""
        for kind in spec_class.__mro__:
            handler = self.by_spec.get(kind, {}).get(op)
            if handler is not None:
                return handler
        return None


class _ForkedRegistry(Registry):
    """The registry of a forked child: a call on a tensor of a group that the child has no part in raises first."""

    def find(self, op: Op, spec_class: type) -> Handler | None:
        """The handler, behind a check of the group."""
        handler = super().find(op, spec_class)

        def checked(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
            group_state(process_group)
            assert handler is not None
            return handler(types, args, kwargs, process_group)

        return None if handler is None else checked


registry = Registry()


def _check_groups() -> None:
    if is_forked_from_rank():
        registry.__class__ = _ForkedRegistry


os.register_at_fork(after_in_child=_check_groups)  # so that a rank pays nothing for it


def add_handler(op: Op, func: Handler, op_table: Table) -> None:
    """Put a handler with a valid signature into a table."""
    signature = inspect.signature(func)
    if len(signature.parameters) != 4:
        raise SignatureError(
            "Custom sharded op function expects signature: (types, args, kwargs, process_group), "
            f"but received signature: {signature}"
        )
    op_table[op] = func
    registry.version += 1


def decorator_func(wrapped_func: Handler, op: Op, op_table: Table) -> Handler:
    """Register a handler that is called only with valid arguments."""

    @functools.wraps(wrapped_func)
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        basic_validation(op, args, kwargs)
        return wrapped_func(types, args, kwargs, process_group)

    add_handler(op, handler, op_table)
    return handler


def register_op(func: Op) -> Callable[[Handler], Handler]:
    """Decorator: how this torch function is computed whenever a sharded tensor is among its arguments.

    The handler is called on every rank that calls the function, as ``handler(types, args, kwargs, process_group)``, in
    the place of what the library would do. It computes on the local tensors, and talks by itself if need be::

        >>> @shardwise.register_op(torch.special.gammaincc)
        ... def gammaincc(types, args, kwargs, process_group):
        ...     return shardwise.from_local(torch.special.gammaincc(*(one.local_tensor() for one in args)))
        >>> x = shardwise.ones(0, 4)
        >>> torch.special.gammaincc(x, x).shape
        torch.Size([4])

    Raises `SignatureError` for a handler that cannot be called so.
    """
    return functools.partial(decorator_func, op=func, op_table=registry.overrides)


def custom_sharding_spec_op(sharding_spec_class: type, func: Op) -> Callable[[Handler], Handler]:
    """Decorator: handle this torch function for tensors whose spec is of this class or derived from it."""
    table = registry.by_spec.setdefault(sharding_spec_class, {})
    return functools.partial(decorator_func, op=func, op_table=table)


def sharded_op_impl(func: Op) -> Callable[[Handler], Handler]:
    """Decorator: the built-in handling of this torch function, which overrides and spec ops can replace."""
    return functools.partial(decorator_func, op=func, op_table=registry.built_in)


def register_default_op(op: Op, decorator: Callable[[Op], Callable[[Handler], Handler]]) -> None:
    """Handle an op as `torch.Tensor` does: for attributes of the wrapper itself, such as its size."""

    @decorator(op)
    def default_op(types: Any, args: Any = (), kwargs: Any = None, pg: Any = None) -> Any:
        with DisableTorchFunction():  # modes too: a mode that called this handler would call it again
            return op(*args, **(kwargs or {}))


def has_custom_op(sharding_spec: object, op: Op) -> bool:
    """Whether a handler is registered for this spec's class."""
    return registry.find_for_spec(op, type(sharding_spec)) is not None


def dispatch_custom_op(sharding_spec: object, op: Op, types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    """Call the handler that is registered for this spec's class."""
    handler = registry.find_for_spec(op, type(sharding_spec))
    if handler is None:
        raise UnsupportedOpError(f"Custom op: {op} not registered for {type(sharding_spec).__qualname__}")
    return handler(types, args, kwargs, process_group)


def distributed_in(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Iterator[Distributed]:
    """The distributed tensors among the arguments of a call, also inside lists, tuples and dicts."""
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, Distributed):
            yield leaf


def basic_validation(op: Op, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
    """Raise unless there is a distributed tensor among the arguments, and all such share one process group."""
    name = op_name(op)
    if not args and not kwargs:
        raise NoDistributedTensorError(f" No input for '{name}'!")
    found = list(distributed_in(args, kwargs))
    if not found:
        raise NoDistributedTensorError(
            f"torch function '{name}', with args: {summary(args)} and kwargs: {summary(kwargs)} "
            "are called without any distributed tensor!"
        )
    if any(tensor._process_group is not found[0]._process_group for tensor in found):
        raise ProcessGroupError(
            f"All distributed tensors should use the same ProcessGroup if used together in an op, here '{name}'"
        )


# Functions that take tensors of any kind; foreach functions, whose handlers look at each row, add themselves.
TAKE_ANY = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}


def is_dtensor(value: object) -> bool:
    """Whether this is a DTensor. Does not import DTensor, which takes long."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def require_plain(tensor: object, purpose: str) -> None:
    """Raise if a tensor that should be plain is distributed."""
    if is_dtensor(tensor):
        raise PropertyError(
            f"{purpose} is a plain tensor, found {summary(tensor)}: shardwise.from_dtensor(dtensor, spec) makes a "
            "ShardedTensor of it, dtensor.to_local() gives what this rank holds of it"
        )
    if isinstance(tensor, Distributed):
        raise PropertyError(
            f"{purpose} is a plain tensor, found {summary(tensor)}: redistribute(spec) gives it in another sharding, "
            "full_tensor() the whole of it"
        )


def refuse_mixed(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any] | None, name: str = "ShardedTensor") -> None:
    """Raise if a DTensor is among the arguments of an op on tensors of this library, also inside lists and tuples."""
    module = sys.modules.get("torch.distributed.tensor")  # not imported here, which takes long
    kind = getattr(module, "DTensor", None)
    if kind is None or op in TAKE_ANY:
        return
    for value in (*args, *kwargs.values()) if kwargs else args:
        found = value.__class__ is kind or (
            value.__class__ in (list, tuple) and any(one.__class__ is kind for one in value)
        )
        if found:
            raise mixed_operands(op, args, name)


def mixed_operands(op: Op, args: Sequence[Any], name: str = "ShardedTensor") -> MixedOperandsError:
    """The error of an op that was given a DTensor beside a tensor of this library."""
    return MixedOperandsError(
        f"'{op_name(op)}' was given a {name} and a DTensor, with args: {summary(args)}. Convert one: "
        "shardwise.from_dtensor(dtensor) gives a ShardedTensor, "
        "shardwise.to_dtensor(tensor, mesh, placements) a DTensor"
    )


def refuse_collective(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
    """Raise if this is a collective of torch: a wrapper has no memory to send."""
    if getattr(op, "namespace", None) in COLLECTIVES or getattr(op, "__module__", None) == C10D:
        raise collective_error(op_name(op), [*args, *(kwargs or {}).values()])


C10D = "torch.distributed.distributed_c10d"  # its functions in Python
COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem"})


def collective_error(name: str, args: Sequence[Any]) -> CollectiveOpError:
    """The error for a collective on sharded tensors, with the ways out."""
    return CollectiveOpError(
        f"torch.distributed cannot send or receive a ShardedTensor, in '{name}' with {summary(args)}. Its data lies on "
        "all ranks already: call the collective on the tensors of local_shards(), or ask for redistribute(spec), for "
        "full_tensor(), which is the same on every rank, or for to_dtensor(mesh, placements)"
    )


def unsupported(
    op: Op, args: Sequence[Any], kwargs: Mapping[str, Any] | None, why: str, way_out: str = ""
) -> UnsupportedOpError:
    """The error for an op that cannot be computed: the reason, a way out, and the call without its data."""
    way_out = way_out or (
        "Register a rule with @shardwise.register_op, or compute on the plain tensors of local_shards()"
    )
    getter = getattr(op, "__name__", "") == "__get__"
    error = (NoAttributeError if getter else UnsupportedOpError)(
        f"{why}. {way_out}: torch function '{op_name(op)}', with args: {summary(args)} and "
        f"kwargs: {summary(kwargs)} not supported for ShardedTensor!"
    )
    error.reason = why
    return error


def op_name(op: Op) -> str:
    """The name a user knows an op by; a property's getter is named after the property."""
    name = getattr(op, "__name__", None) or repr(op)
    owner = getattr(op, "__self__", None)
    return getattr(owner, "__name__", name) if name in ("__get__", "__set__", "__delete__") else name


def summary(value: Any) -> str:
    """Arguments in one line, tensors by shape and dtype only."""
    if isinstance(value, Distributed):
        return repr(value)
    if isinstance(value, torch.Tensor):
        kind = "DTensor" if type(value).__name__ == "DTensor" else "Tensor"
        return f"{kind}({tuple(value.shape)}, {value.dtype})"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(summary, value)) + ")"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {summary(item)}" for key, item in value.items()) + "}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
