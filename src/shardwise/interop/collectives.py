"""Collectives of torch that are given sharded tensors in a list: torch asks the tensors in none of its lists of lists.

Those that are given one by itself are found where torch calls them (`dispatch.refuse_collective`).
"""

from __future__ import annotations

import functools
from typing import Any

from shardwise.dispatch import Distributed, collective_error
from shardwise.interop.loading import Function, replace_when_loaded

C10D = "torch.distributed.distributed_c10d"


def _refusing(theirs: Function) -> Function:
    """The check of each list of tensors, which also refuses sharded ones."""

    @functools.wraps(theirs)
    def check(param: Any, param_name: str) -> None:
        theirs(param, param_name)
        if any(isinstance(tensor, Distributed) for tensor in param):
            raise collective_error(param_name, param)

    return check


replace_when_loaded(C10D, "_check_tensor_list", _refusing)
