"""What peft is told when it saves adapters that are sharded: its files hold whole tensors."""

from __future__ import annotations

import functools
from typing import Any

from shardwise import settings
from shardwise.errors import CheckpointError
from shardwise.interop.loading import Function, replace_when_loaded
from shardwise.sharded_tensor import ShardedTensor

PEFT = "peft.peft_model"


def _whole(theirs: Function) -> Function:
    """`get_peft_model_state_dict` as peft's models save by it, with whole tensors. Every rank calls it."""

    @functools.wraps(theirs)
    def state_dict(*args: Any, **kwargs: Any) -> Any:
        state, budget = theirs(*args, **kwargs), settings.current().gather_budget
        for name, tensor in state.items():
            if isinstance(tensor, ShardedTensor) and tensor.nbytes > budget:
                raise CheckpointError(
                    f"peft saves whole tensors, and '{name}' of {tensor.nbytes:,} bytes is beyond the gather budget of "
                    f"{budget:,}: save within shardwise.gather_budget({tensor.nbytes}), or with shardwise.save"
                )
        return {
            name: tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor
            for name, tensor in state.items()
        }

    return state_dict


replace_when_loaded(PEFT, "get_peft_model_state_dict", _whole)
