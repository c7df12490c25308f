"""Two functions of torch outside the old system misjudge sharded tensors: while installed, ours are in their place.

One puts whole tensors together for a full state dict, and takes each to be cut into even chunks of its first dim. The
other prepares a state for a checkpoint, and forgets the tensors that a rank has no shards of, which a load then takes
for a sign of an old format. Neither asks anything that a tensor could answer for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup

from shardwise.interop.loading import Function, replace_when_loaded
from shardwise.sharded_tensor import ShardedTensor


def gathering(theirs: Function) -> Callable[..., torch.Tensor]:
    """What puts a sharded tensor together for a full state dict, however it is cut."""

    def gathered(
        sharded_tensor: ShardedTensor, pg: ProcessGroup | None = None, device: torch.device | None = None
    ) -> torch.Tensor:
        """The whole tensor on every rank of its own group, each of which calls it."""
        whole = sharded_tensor.full_tensor().detach()
        return whole if device is None else whole.to(device)

    return gathered


def flattening(theirs: Function) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What prepares a state for a checkpoint, and keeps what this rank has no shards of."""

    def flattened(state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state, with sharded tensors in sharded tensors taken apart."""
        from torch.distributed.checkpoint._traverse import set_element, traverse_state_dict

        state: dict[str, Any] = theirs(state_dict)

        def keep(path: Any, value: object) -> None:
            if isinstance(value, ShardedTensor) and not value._frame.rows:
                set_element(state, path, value)

        traverse_state_dict(state_dict, keep)
        return state

    return flattened


# By module and name, what makes our function from theirs.
REPLACED: list[tuple[str, str, Callable[[Function], Function]]] = [
    ("torch.distributed._state_dict_utils", "_all_gather_sharded_tensor", gathering),
    ("torch.distributed.checkpoint._sharded_tensor_utils", "_flatten_sharded_tensors", flattening),
]
_undoing: list[Callable[[], None]] = []  # what `stop` does


def start() -> None:
    """Replace them, now or when they are loaded."""
    for module, name, make in REPLACED:
        _undoing.append(replace_when_loaded(module, name, make))


def stop() -> None:
    """Put back what was replaced, and replace no more."""
    while _undoing:
        _undoing.pop()()
