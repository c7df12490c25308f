"""Hooks for modules that hold sharded tensors as plain attributes."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import SPECS, chunks, whole

import shardwise
from shardwise.comm.group.members import load_with_process_group
from shardwise.errors import ProcessGroupError
from shardwise.testing import ranks


class Holder(torch.nn.Module):
    """A module with sharded tensors of its own and in a child."""

    def __init__(self, tensor: Any, child: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.table = tensor
        self.child = child
        self._register_state_dict_hook(shardwise.tensor.state_dict_hook)
        self._register_load_state_dict_pre_hook(shardwise.tensor.pre_load_state_dict_hook, with_module=True)


@ranks(4)
def test_state_dict_and_back() -> None:
    """Keys follow the module tree; loading sets the attributes."""
    spec = SPECS["uneven, several per rank"]
    module = torch.nn.Sequential(Holder(shardwise.rand(spec, 7, 6), Holder(shardwise.rand(chunks(0, 0, 3), 4))))
    state = module.state_dict()
    assert sorted(state) == ["0.child.table", "0.table"]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    target = torch.nn.Sequential(Holder(None, Holder(None)))
    target.load_state_dict(torch.load(file, weights_only=True), strict=False)
    outer: Any = target[0]
    assert torch.equal(whole(outer.table), whole(module[0].table))
    assert torch.equal(whole(outer.child.table), whole(module[0].child.table))


@ranks(4)
def test_state_dict_of_a_sub_group() -> None:
    """Loaded within the group's context; a rank that is not in the group makes, saves and loads what it has none of."""
    group = dist.new_group([0, 3])
    inside = dist.get_rank() in (0, 3)
    assert inside or group == dist.GroupMember.NON_GROUP_MEMBER
    for make in (shardwise.empty, shardwise.zeros, shardwise.ones, shardwise.randn):
        assert len(make(chunks(1, 0, 3), 2, 5, process_group=group).local_shards()) == inside
    assert len(shardwise.full(chunks(1, 0, 3), (2, 5), 1, process_group=group).local_shards()) == inside
    module = Holder(shardwise.rand(chunks(1, 0, 3), 2, 5, process_group=group))
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    target = Holder(None)
    with load_with_process_group(group):
        target.load_state_dict(torch.load(file, weights_only=True), strict=False)
    assert len(target.table.local_shards()) == inside
    assert target.table.metadata() == module.table.metadata()
    assert (target.table + 1).shape == (2, 5)
    if inside:
        assert torch.equal(whole(target.table), whole(module.table))
    else:
        linear = torch.nn.functional.linear
        for call in (
            module.table.sum,
            lambda: module.table.equal(module.table),
            module.table.full_tensor,
            lambda: linear(torch.ones(3, 5), module.table),
        ):
            with pytest.raises(ProcessGroupError, match=r"this rank is not in the .*process group"):
                call()


@ranks(2)
def test_a_module_without_sharded_tensors_is_left_alone() -> None:
    """Same keys as without the hooks."""
    module = Holder(None, torch.nn.Linear(2, 2))
    assert sorted(module.state_dict()) == ["child.bias", "child.weight"]
    missing, unexpected = module.load_state_dict(module.state_dict())
    assert not missing
    assert not unexpected


@ranks(2)
def test_loading_errors() -> None:
    """A state dict for another place in the world."""
    file = io.BytesIO()
    torch.save(Holder(shardwise.rand(chunks(0, 0, 1), 4)).state_dict(), file)
    file.seek(0)
    group = dist.new_group([1, 0])
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with load_with_process_group(alone), pytest.raises(RuntimeError, match="at save time was"):
        torch.load(file, weights_only=True)
    assert group is not None
