"""A sharded tensor has no memory of its own: whoever asks for its address is told where the data is, and does not crash."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.dispatch import op_name, registry
from shardwise.errors import UnsupportedOpError

ADDRESSES = ("data_ptr", "untyped_storage", "storage", "_typed_storage", "__dlpack__", "__dlpack_device__")


def _refuse(name: str) -> None:
    method = getattr(torch.Tensor, name)

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        raise UnsupportedOpError(
            f"{op_name(method)} was called on {args[0]!r}, which has no memory of its own. Take the tensors of "
            "local_shards(), each rank's part, or full_tensor(), a plain tensor; shardwise.save writes sharded tensors "
            "to files"
        )

    registry.built_in[method] = handler


def _share_memory(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    """Bring this rank's shards into memory that other processes can share."""
    for local in args[0]._local_tensors():
        local.share_memory_()
    return args[0]


def _is_shared(types: Any, args: Any, kwargs: Any, process_group: Any) -> bool:
    """Whether all of this rank's shards lie in such memory."""
    return all(local.is_shared() for local in args[0]._local_tensors())


for _name in ADDRESSES:
    _refuse(_name)
registry.built_in[torch.Tensor.share_memory_] = _share_memory
registry.built_in[torch.Tensor.is_shared] = _is_shared
