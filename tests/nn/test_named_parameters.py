"""`named_params_with_sharded_tensor`: every parameter once, sharded attributes of the old kind among them."""

from __future__ import annotations

import torch
from tests.cases import chunks
from torch import nn

from shardwise import ShardedTensor, zeros
from shardwise.nn import shard_parameter
from shardwise.nn.parameters import named_params_with_sharded_tensor
from shardwise.testing import ranks


class Old(nn.Module):
    """As modules were written for the old system: the sharded tensor is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.table = zeros(chunks(0, 0, 1), 4, 2)
        self.again = self.table
        self.fc = nn.Linear(2, 2)


def model() -> nn.ModuleDict:
    """Two kinds of sharded parameters, a tie, and a module that is used twice."""
    old = Old()
    made = nn.ModuleDict({"old": old, "same": old, "new": nn.Linear(2, 2), "tied": nn.Linear(2, 2, bias=False)})
    shard_parameter(made["new"], "weight", chunks(0, 0, 1))
    made["tied"].weight = made["new"].weight
    return made


@ranks(2)
def test_each_tensor_is_named_once() -> None:
    """Sharded attributes first, then parameters, as they lie in the module."""
    made = model()
    found = dict(named_params_with_sharded_tensor(made))
    assert list(found) == ["old.table", "old.fc.weight", "old.fc.bias", "new.weight", "new.bias"]
    assert [name for name, one in found.items() if isinstance(one, ShardedTensor)] == ["old.table", "new.weight"]
    assert found["old.table"] is made["old"].table
    assert len({id(one) for one in found.values()}) == len(found)


@ranks(2)
def test_prefix_and_recurse_hold_for_both_kinds() -> None:
    """A prefix is put before every name; without recurse only what the module itself has is named."""
    old = model()["old"]
    assert [name for name, _ in named_params_with_sharded_tensor(old, "net")] == [
        "net.table",
        "net.fc.weight",
        "net.fc.bias",
    ]
    assert [name for name, _ in named_params_with_sharded_tensor(old, recurse=False)] == ["table"]
    assert [name for name, _ in named_params_with_sharded_tensor(old.fc, "x.y", recurse=False)] == [
        "x.y.weight",
        "x.y.bias",
    ]


@ranks(2)
def test_a_parameter_that_is_also_an_attribute_is_named_once() -> None:
    """By the attribute, which comes first."""
    module = nn.Linear(2, 2, bias=False)
    shard_parameter(module, "weight", chunks(0, 0, 1))
    vars(module)["kept"] = module.weight
    assert [name for name, _ in named_params_with_sharded_tensor(module)] == ["kept"]
    assert list(named_params_with_sharded_tensor(nn.ReLU())) == []
    assert torch.equal(next(named_params_with_sharded_tensor(module))[1].full_tensor(), module.weight.full_tensor())
