"""Buffers of a module that was made on meta: which have no data, and filling them from a new module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode

from shardwise.comm.agreement import in_step
from shardwise.comm.group import Fields, or_default
from shardwise.errors import PropertyError
from shardwise.tensor import ShardedTensorBase

MOST_NAMED = 5


def fill_buffers(
    model: nn.Module, make: Callable[[], nn.Module], *, process_group: ProcessGroup | None = None
) -> nn.Module:
    """Fill the buffers that no checkpoint holds from a module that is made anew; gives the model.

    A module that was made on ``meta`` has buffers without values, and `Module.to_empty` gives them memory without
    values. Those that are not persistent, such as ``inv_freq`` of rotary embeddings, no checkpoint brings back.
    ``make`` makes the same module again, not on ``meta``. Parameters that begin as ``torch.empty``, as those of torch's
    layers do, get no memory for that. All buffers that are not persistent are filled, and those that are still on
    ``meta``; they are put where the model's parameters are. Every rank of the group calls it; a digest travels.

    >>> import torch, shardwise
    >>> class Scaled(torch.nn.Linear):
    ...     def __init__(self):
    ...         super().__init__(2, 2)
    ...         self.register_buffer("scale", torch.tensor(3.0), persistent=False)
    >>> with torch.device("meta"):
    ...     model = Scaled()
    >>> shardwise.fill_buffers(model, Scaled).scale
    tensor(3.)
    """

    def work() -> tuple[dict[str, torch.Tensor], Fields]:
        wanted = [
            name
            for name, owner, own in _buffers(model)
            if (own.is_meta or _is_temporary(owner, name)) and not isinstance(own, ShardedTensorBase)
        ]
        found = _values_from_new(make, wanted, _WithoutValues())
        if len(found) < len(wanted):  # a buffer that began as torch.empty
            found = _values_from_new(make, wanted, nullcontext())
        if len(found) < len(wanted):
            lacking = [name for name in wanted if name not in found]
            raise PropertyError(f"the module that was made anew has no values for {_listed(lacking)}")
        return found, {"verb": "fill_buffers", "buffers": wanted}

    alone = process_group is None and not (torch.distributed.is_available() and torch.distributed.is_initialized())
    made = work()[0] if alone else in_step(or_default(process_group), work)
    device = _device_of(model)
    for name, owner, own in list(_buffers(model)):
        if name in made:
            there = device if own.is_meta else own.device
            owner._buffers[name.rpartition(".")[2]] = made[name].to(there, own.dtype)
    return model


def _values_from_new(
    make: Callable[[], nn.Module], wanted: list[str], mode: AbstractContextManager[object]
) -> dict[str, torch.Tensor]:
    """The wanted buffers that have values in a module that is made within this mode."""
    if not wanted:
        return {}
    with torch.random.fork_rng([]), torch.device("cpu"), mode:
        twin = dict(make().named_buffers(remove_duplicate=False))
    return {name: twin[name] for name in wanted if name in twin and not twin[name].is_meta}


def buffers_without_data(model: nn.Module) -> list[str]:
    """The buffers on meta that are not persistent: no checkpoint fills them."""
    return [name for name, owner, own in _buffers(model) if own.is_meta and _is_temporary(owner, name)]


def require_data(model: nn.Module) -> None:
    """Raise if buffers are left on meta that no checkpoint fills; the error says how to fill them."""
    found = buffers_without_data(model)
    if found:
        raise PropertyError(
            f"{_listed(found)} of {type(model).__name__} would stay on meta: no checkpoint holds buffers that are not "
            "persistent. Fill them first: shardwise.fill_buffers(model, make), where make() makes such a module anew, "
            "or put a submodule with values in the place of the one that has them"
        )


class _WithoutValues(TorchFunctionMode):
    """Lets `torch.empty` make tensors on meta: parameters that are about to be initialised."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _buffers(model: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    for path, owner in model.named_modules():
        for name, own in owner._buffers.items():
            if own is not None:
                yield (f"{path}.{name}" if path else name), owner, own


def _is_temporary(owner: nn.Module, name: str) -> bool:
    return name.rpartition(".")[2] in owner._non_persistent_buffers_set


def _device_of(model: nn.Module) -> torch.device:
    """The device of the parameters that have data."""
    found = [p for p in model.parameters() if not p.is_meta]
    sharded = [p for p in found if isinstance(p, ShardedTensorBase)]
    return (sharded or found)[0].device if found else torch.device("cpu")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(f"'{name}'" for name in names[:MOST_NAMED]) + more
