"""`ResultCache`: results of ops on fake tensors, known from equal calls before.

A model has many equal blocks, and its step has the same ops many times. Torch's own cache takes some times longer.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from shardwise.torch_private import FakeTensor, FakeTensorMode, make_subclass, refuse_data_access

LITERALS = {bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
MISSING = object()
CPU = torch.device("cpu")
MOST = 50_000  # results that are kept
_known: dict[Any, Any] = {}  # of all modes: sizes are those of any


class _Same(NamedTuple):
    """An argument, as of an op in place."""

    number: int


class _Made(NamedTuple):
    """A new tensor; or a view of an argument, if a number is given."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    of: int | None


class ResultCache:
    """Of one mode. All tensors are on the CPU."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._attributes: dict[str, Any] = {}  # of fake tensors that are not asked for values
        if len(_known) > MOST:
            _known.clear()

    def key(self, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        """What equal calls have in common, and their tensors into the list; None if it is not known."""
        parts: list[Any] = [func, torch.is_inference_mode_enabled()]
        try:
            self._add(parts, args, tensors)
            for name, value in kwargs.items():
                parts.append(name)
                self._add(parts, value, tensors)
            return tuple(parts)
        except _UnknownError:
            return None

    def _add(self, parts: list[Any], value: Any, tensors: list[torch.Tensor]) -> None:
        kind = value.__class__
        if kind is FakeTensor:
            if value.constant is not None or value.fake_device != CPU or value.layout != torch.strided:
                raise _UnknownError
            tensors.append(value)
            parts += (value.shape, value.stride(), value.storage_offset(), value.dtype)
        elif kind is tuple or kind is list:
            parts += (kind, len(value))
            for one in value:
                self._add(parts, one, tensors)
        elif kind in LITERALS:
            parts += (kind, value)
        else:
            raise _UnknownError

    def result(self, key: Any, tensors: list[torch.Tensor]) -> Any:
        """The result of a call with this key, or `MISSING`."""
        known = _known.get(key, MISSING)
        return MISSING if known is MISSING else self._made(known, tensors)

    def _made(self, known: Any, tensors: list[torch.Tensor]) -> Any:
        if known.__class__ is _Same:
            return tensors[known.number]
        if known.__class__ is _Made:
            if known.of is None:
                elem = torch.empty_strided(known.size, known.stride, dtype=known.dtype, device="meta")
            else:
                elem = torch.empty(0, dtype=known.dtype, device="meta")
                elem.set_(tensors[known.of].untyped_storage(), known.offset, known.size, known.stride)
            return self._fake(elem)
        if known.__class__ in (tuple, list):
            return known.__class__(self._made(one, tensors) for one in known)
        return known

    def _fake(self, elem: torch.Tensor) -> Any:
        """A fake tensor on the CPU, made as torch makes them, with the attributes of one that torch has made."""
        made: Any = make_subclass(FakeTensor, elem, False, dispatch_device=True, device_for_backend_keys=CPU)
        refuse_data_access(made)
        if not self._attributes:
            self._attributes = vars(FakeTensor(self._mode, elem, CPU))
        made.__dict__.update(self._attributes)
        return made

    def keep(self, key: Any, tensors: list[torch.Tensor], out: Any) -> None:
        """Remember the result of a call."""
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        storages = {tensor.untyped_storage()._cdata: number for number, tensor in enumerate(tensors)}
        try:
            _known[key] = self._description(out, numbers, storages)
        except _UnknownError:
            return

    def _description(self, out: Any, numbers: dict[int, int], storages: dict[int, int]) -> Any:
        if id(out) in numbers:
            return _Same(numbers[id(out)])
        if out.__class__ is FakeTensor:
            of = storages.get(out.untyped_storage()._cdata)
            plain = out.fake_device.type == "cpu" and out.layout == torch.strided and out.constant is None
            whole = of is not None or (out.storage_offset() == 0 and out.untyped_storage().nbytes() == _span(out))
            if not plain or not whole or out.is_conj() or out.is_neg():
                raise _UnknownError
            return _Made(tuple(out.shape), out.stride(), int(out.storage_offset()), out.dtype, of)
        if out.__class__ in (tuple, list):
            return out.__class__(self._description(one, numbers, storages) for one in out)
        if out is None or isinstance(out, int | float | bool):
            return out
        raise _UnknownError


class _UnknownError(Exception):
    """A call or a result that is of none of the usual kinds."""


def _span(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the last one."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
