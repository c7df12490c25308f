"""`torch.compile` of blocks: those that run on plain samples are one graph each, compiled once."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from tests.cases import ROUNDING
from tests.nn.fully_sharded.cases import Model, batch_of, mine, whole
from torch import nn
from torch._dynamo import lookup_backend

import shardwise
from shardwise.testing import ranks

STEPS = 5


def compiled_blocks(model: Model, way: str, backend: Any) -> None:
    """Compile each block, in its place or as a new module around it."""
    for number, block in enumerate(model.blocks):
        if way == "in place":
            block.compile(backend=backend)
        else:
            compiled: Any = torch.compile(block, backend=backend)
            model.blocks[number] = compiled


@pytest.mark.parametrize("way", ["in place", "around"])
@pytest.mark.parametrize("first", ["compile", "shard"])
@ranks(3)
def test_compiled_blocks(way: str, first: str) -> None:
    """Before or after `fully_shard`: gradients of the plain model; one graph for all blocks, also for a rank without
    samples; nothing is compiled from the third step on."""
    warnings.simplefilter("ignore")  # a warning that is an error makes the compiler give a frame up
    torch._dynamo.reset()
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(step)
        return lookup_backend("aot_eager")(graph, inputs)

    torch.manual_seed(0)
    plain: nn.Module = Model().double()
    model = copy.deepcopy(plain)
    assert isinstance(model, Model)
    if first == "compile":
        compiled_blocks(model, way, backend)
    shardwise.fully_shard(model, weights=[2, 1, 1])
    if first == "shard":
        compiled_blocks(model, way, backend)
    samples = (2, 3, 0)
    for step in range(STEPS):
        plain.zero_grad()
        model.zero_grad()
        ids, labels = batch_of(step, samples)
        plain(ids, labels).backward()
        model(mine(ids, samples), mine(labels, samples)).backward()
        ours = {name.replace("_orig_mod.", ""): one for name, one in model.named_parameters()}
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(whole(ours[name].grad), parameter.grad, rtol=ROUNDING, atol=ROUNDING)
    assert len(graphs) > 0
    assert max(graphs) < 2, graphs
