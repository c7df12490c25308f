"""Plans by one rule for every parameter."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.models.twins import assert_trains_alike
from tests.nn.plans.worlds import world_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise import shard_module
from shardwise.errors import PlanError, SpecError
from shardwise.plans import columns, fully_sharded, rows
from shardwise.testing import ranks


def model() -> nn.Module:
    """A convolution, a norm, a linear layer with one output, and a tied weight."""
    made = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(24, 1))
    made.register_module("again", made[3])
    return made.double()


@ranks(3)
def test_a_model_trains_as_its_twin() -> None:
    """However it is cut, evenly and in proportion."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 6, 3), nn.LayerNorm(2), nn.Flatten(), nn.Linear(24, 2)).double()
    x = torch.randn(5, 2, 4, 4, dtype=torch.float64)
    for make in (fully_sharded, rows, columns):
        for weights in (None, [3, 0, 1]):
            twin = shard_module(copy.deepcopy(plain), make(plain, weights=weights))
            assert_trains_alike(twin, plain, {"x": x}, {"x": x}, lambda net, x: net(x).square().sum())


def test_which_dim_is_cut() -> None:
    """The longest, the first of several; dim 0; dim 1. Tied parameters are told once; lines of a mesh hold replicas."""
    with world_of(4):
        cuts = {
            make: {one.name: one.cut for one in make(model()).reasons if not one.name.startswith("1")}
            for make in (fully_sharded, rows, columns)
        }
        over = "dim {} over 4 ranks".format
        names = ("0.weight", "0.bias", "3.weight", "3.bias")
        for make, found in cuts.items():
            assert tuple(found) == names, make
        assert tuple(cuts[fully_sharded].values()) == (over(0), over(0), over(1), "plain")
        assert tuple(cuts[rows].values()) == (over(0),) * 4
        assert tuple(cuts[columns].values()) == (over(1), "plain", over(1), "plain")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        weighed = fully_sharded(model(), mesh["shard"], weights=[5, 1])
        assert weighed.reasons[0].cut == "dim 0 as 5 | 1, 2 replicas"
        assert weighed.plan["0.weight"].layout((6, 2, 3, 3)).ranks.tolist() == [0, 1, 2, 3]
        across = fully_sharded(model(), mesh["replica"]).plan["0.weight"].layout((6, 2, 3, 3))
        assert across.ranks.tolist() == [0, 2, 1, 3]
        for weights in ([1, 1], [1, 1, 1, -1], [0, 0, 0, 0]):
            with pytest.raises(SpecError, match="4 places need 4 weights"):
                rows(model(), weights=weights)
        with pytest.raises(PlanError, match=r"'0\.weight' has no size yet"):
            rows(nn.Sequential(nn.LazyLinear(3)))
