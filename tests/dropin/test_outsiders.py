"""Ranks outside of a tensor's group, on the drop-in: as in the old system they make, save, load and compare it."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import places

import shardwise
from shardwise import dropin
from shardwise.errors import ProcessGroupError
from shardwise.layout.specs import ChunkShardingSpec
from shardwise.testing import ranks


@ranks(4, bare=True)
def test_a_state_dict_of_a_group_that_not_all_ranks_are_in(tmp_path: Any) -> None:
    """Every rank saves, loads and compares, whether or not it holds anything; members learn whether values differ."""
    dropin.install()
    import torch.distributed.checkpoint as dcp
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.api import load_with_process_group

    group, other = dist.new_group([2, 3]), dist.new_group([1, 2])
    spec = ChunkShardingSpec(0, places(2, 3))
    inside = dist.get_rank() >= 2

    class Model(torch.nn.Module):
        def __init__(self, value: float | None) -> None:
            super().__init__()
            self.tensor = None if value is None else sharded_tensor.full(spec, (6, 4), value, process_group=group)
            self._register_state_dict_hook(sharded_tensor.state_dict_hook)
            self._register_load_state_dict_pre_hook(sharded_tensor.pre_load_state_dict_hook, True)

    model, loaded, file = Model(3.0), Model(None), io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    with load_with_process_group(group):
        loaded.load_state_dict(torch.load(file, weights_only=False), strict=False)
    assert len(loaded.tensor.local_shards()) == inside
    assert torch.equal(model.tensor, loaded.tensor)
    assert model.tensor.allclose(loaded.tensor)
    different = Model(4.0)
    assert torch.equal(model.tensor, different.tensor) == (not inside)
    if not inside:
        elsewhere = sharded_tensor.ones(ChunkShardingSpec(0, places(1, 2)), 6, 4, process_group=other)
        assert torch.equal(model.tensor, elsewhere) == (dist.get_rank() == 0)
    else:
        sharded_tensor.ones(ChunkShardingSpec(0, places(1, 2)), 6, 4, process_group=other)
    dcp.save({"tensor": model.tensor}, checkpoint_id=str(tmp_path / "dcp"))
    dcp.load({"tensor": different.tensor}, checkpoint_id=str(tmp_path / "dcp"))
    assert torch.equal(model.tensor, different.tensor)
    shardwise.save({"tensor": model.tensor}, tmp_path / "own")
    different = Model(5.0)
    shardwise.load({"tensor": different.tensor}, tmp_path / "own")
    assert torch.equal(model.tensor, different.tensor)
    dropin.uninstall()
    if not inside:
        with pytest.raises(ProcessGroupError, match="not in the process group of the tensor"):
            torch.equal(model.tensor, different.tensor)
