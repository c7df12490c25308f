"""Which ops a gather budget of 0 refuses, found by one process: a rank of a world whose other ranks are not there.

What would come from other ranks is 0, so values are not compared; whether an op needs a whole operand follows from
sizes and layouts. Prints the names of the ops that were refused: `python -m benchmarks.coverage.one_process`.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import shardwise
from benchmarks.coverage.database import Case, NoCases, can_be_cut, cases, is_dense, names, seed
from benchmarks.coverage.refused import REFUSED
from shardwise.errors import UnsupportedOpError

SAMPLES = 12  # of ops that are expected to be refused
OTHER_SAMPLES = 2
EMPTY: Callable[..., torch.Tensor] = torch.empty


def is_refused(case: Case, cut: str) -> bool:
    """Whether a call is refused with its arguments cut in the first or last dim."""
    places = [f"rank:{rank}/cpu" for rank in range(dist.get_world_size())]

    def sharded(leaf: Any) -> Any:
        if not can_be_cut(leaf) or not is_dense(leaf):
            return leaf
        dim = 0 if cut == "first" else leaf.ndim - 1
        return shardwise.tensor.shard_tensor(leaf, shardwise.ChunkShardingSpec(dim, places))

    arguments = [sharded(leaf) for leaf in case.plain(grad=False)]
    seed()
    try:
        with shardwise.gather_budget(0):
            case.run(arguments)
    except UnsupportedOpError:
        return True
    except Exception:  # of values that are not there
        return False
    return False


def works(case: Case) -> bool:
    """Whether a call works on plain tensors."""
    try:
        case.run(case.plain(grad=False))
    except Exception:
        return False
    return True


def refused(name: str) -> bool:
    """Whether any call of an op is refused."""
    listed = any(name in ops for ops in REFUSED.values())
    try:
        found = cases(name, SAMPLES if listed else OTHER_SAMPLES, "cpu")
    except NoCases:
        return False
    return any(works(case) and any(is_refused(case, cut) for cut in case.cuts()) for case in found)


def zeros(*size: Any, **options: Any) -> torch.Tensor:
    """In the place of `torch.empty`: torch checks neither lengths nor classes, and would read anywhere."""
    made = EMPTY(*size, **options)
    return made if made.is_meta else made.zero_()


def main() -> int:
    """Try all ops, or those with these names, as the first of two ranks."""
    warnings.simplefilter("ignore")  # ops under test warn of many things
    torch.empty = zeros
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    json.dump([name for name in names(sys.argv[1:]) if refused(name)], sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
