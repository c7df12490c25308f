"""torchsnapshot, where it is installed, takes and restores sharded tensors on the drop-in."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.cases import ALL, PLAIN, SIZE, holds

import shardwise
from shardwise import dropin, shard_tensor
from shardwise.testing import ranks

# It divides by the size of a shard, so there must be none without elements.
LAYOUTS = ("chunk dim 0", "chunk out of order", "uneven, several per rank", "all on one rank", "grid")


@pytest.mark.skipif(find_spec("torchsnapshot") is None, reason="torchsnapshot is not installed")
@ranks(4, bare=True)
def test_snapshots_restore_into_another_layout(tmp_path: Path) -> None:
    """Each layout into each of the next ones."""
    dropin.install()
    warnings.simplefilter("ignore")  # it uses what torch deprecates
    from torchsnapshot import Snapshot, StateDict  # type: ignore[import-not-found,unused-ignore] # optional

    for name, other in zip(LAYOUTS, reversed(LAYOUTS), strict=True):
        path = str(tmp_path / name)
        Snapshot.take(path, {"state": StateDict(weight=shard_tensor(PLAIN, ALL[name]), step=3)})
        state = StateDict(weight=shardwise.zeros(ALL[other], *SIZE), step=0)
        Snapshot(path).restore({"state": state})
        assert state["step"] == 3
        assert holds(state["weight"], PLAIN)
        whole = Snapshot(path).read_object("0/state/weight", obj_out=torch.zeros(SIZE))
        assert torch.equal(whole, PLAIN)
