"""`InputForm`: all of a tensor that a graph depends on, without the tensor."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.distributed import ProcessGroup

from shardwise.comm.group import GroupState, group_state
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.frame import Frame

COPIED_FIELDS = ("_is_param", "_is_activation", "_moved", "_copy_of_view", "_strides")


class InputForm:
    """What a graph depends on of one tensor: the same object for all tensors that a graph can have in its place.

    Forms are compared by identity. Strides of local tensors are no part of a form: they may differ on one rank alone.
    """

    __slots__ = (
        "__weakref__",
        "cls",
        "count",
        "dtype",
        "fields",
        "frame",
        "grad",
        "group_state",
        "has_shards",
        "is_leaf",
        "shape",
    )

    def __init__(self, tensor: torch.Tensor, count: int) -> None:
        self.cls: Any = type(tensor)
        self.grad, self.is_leaf = tensor.requires_grad, tensor.is_leaf
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.count = count  # of tensors that a graph has in its place
        self.frame: Frame | None = None  # of a sharded tensor
        self.group_state: GroupState | None = None
        self.fields: dict[str, Any] = {}
        self.has_shards = True
        if isinstance(tensor, ShardedTensorBase):
            self.frame, self.has_shards = tensor._frame, bool(tensor._local_tensors())
            self.group_state = group_state(tensor._frame.process_group)
            self.fields = {name: getattr(tensor, name) for name in COPIED_FIELDS}

    def __str__(self) -> str:
        layout = "" if self.frame is None else f", layout {self.frame.layout.digest.hex()[:8]}"
        return f"{tuple(self.shape)} of {self.dtype}{layout}{', requires grad' if self.grad else ''}"

    @property
    def group(self) -> ProcessGroup | None:
        """Of a sharded tensor."""
        return None if self.frame is None else self.frame.process_group

    def tensor_of(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """A tensor of this form, made of these."""
        if self.frame is None:
            return tensors[0]
        new: ShardedTensorBase = self.cls._of_locals(self.frame, tensors if self.has_shards else [])
        for name, value in self.fields.items():
            if value != getattr(new, name):
                setattr(new, name, value)
        if not self.has_shards:
            new._wants_grad = self.grad
            if tensors and tensors[0].is_leaf:
                new._root = tensors[0]
            elif tensors:
                new._anchor = tensors[0]
        return new


_forms: WeakValueDictionary[tuple[Any, ...], InputForm] = WeakValueDictionary()


def form_of(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> InputForm:
    """The form of a tensor, which these stand for in a graph."""
    depends_on = _depends_on(tensor, tensors)
    found = _forms.get(depends_on)
    if found is None:
        found = _forms[depends_on] = InputForm(tensor, len(tensors))
    return found


def _depends_on(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    local = tuple([(one.shape, one.dtype, one.device) for one in tensors])
    if isinstance(tensor, ShardedTensorBase):
        frame = tensor._frame
        fields = tuple([getattr(tensor, name) for name in COPIED_FIELDS])
        # The state of a group is an object of its own for each group; the id of a group may be another group's later.
        about = type(tensor), frame.layout.digest, frame.dtype, frame.spec_class, group_state(frame.process_group)
        return about, tensor.requires_grad, tensor.is_leaf, local, fields
    return tensor.requires_grad, tensor.is_leaf, local
