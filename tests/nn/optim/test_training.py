"""Training a model with sharded parameters is training its plain twin, with every optimizer of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cases import ALL, CUTS, ROUNDING, chunks
from tests.nn.optim.models import assert_same, batches, model, named, sharded, train, whole

from shardwise import ShardedOptimizer
from shardwise.testing import ranks

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.1}),
    "SGD momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "SGD nesterov foreach": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    "SGD fused": ("SGD", {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "Adam": ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW amsgrad": ("AdamW", {"lr": 0.01, "amsgrad": True}),
    "AdamW foreach": ("AdamW", {"lr": 0.01, "foreach": True}),
    "AdamW fused": ("AdamW", {"lr": 0.01, "fused": True}),
    "Adamax": ("Adamax", {}),
    "NAdam": ("NAdam", {}),
    "RAdam": ("RAdam", {"lr": 0.01}),
    "Adagrad": ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "Adagrad fused": ("Adagrad", {"lr": 0.1, "fused": True}),
    "Adadelta": ("Adadelta", {}),
    "RMSprop": ("RMSprop", {"lr": 0.01, "momentum": 0.5, "centered": True, "eps": 1e-2}),
    "Rprop": ("Rprop", {}),
    "ASGD": ("ASGD", {"t0": 1}),
    "Adafactor": ("Adafactor", {"lr": 0.05}),
    "Adafactor foreach": ("Adafactor", {"lr": 0.05, "foreach": True}),
}


FUSED = [kind for kind in OPTIMIZERS if "fused" in kind]


def make(kind: str, parameters: Any, wrapper: Any = None) -> Any:
    """The optimizer, plain or sharded."""
    name, kwargs = OPTIMIZERS[kind]
    optimizer = getattr(torch.optim, name)
    return optimizer(parameters, **kwargs) if wrapper is None else wrapper(parameters, optimizer, **kwargs)


def compare(kind: str, spec: Any, second: Any) -> None:
    """Train both, three steps; losses and parameters are the same."""
    plain = model()
    twin = sharded(plain, spec, second)
    ours, theirs = make(kind, named(twin), ShardedOptimizer), make(kind, plain.parameters())
    data = batches(3)
    assert train(twin, ours, data) == pytest.approx(train(plain, theirs, data), rel=ROUNDING)
    assert_same(twin, plain)


@pytest.mark.parametrize("kind", FUSED)
@ranks(4)
def test_fused_optimizers_train_as_on_the_plain_twin(kind: str) -> None:
    """Over uneven shards, several on a rank, a rank without any, and plain parameters; others do, with their state
    moved on the way, in `test_state`."""
    compare(kind, ALL["uneven, several per rank"], chunks(0, 0, 1, 2))


@pytest.mark.parametrize("kind", ["AdamW foreach", "Adafactor"])
@pytest.mark.parametrize("layout", CUTS)
@ranks(4)
def test_every_layout_trains_as_the_plain_twin(layout: str, kind: str) -> None:
    """Whatever boxes, on whatever ranks: element by element, and with whole parameters."""
    compare(kind, ALL[layout], chunks(-1, 3, 1))


@pytest.mark.parametrize("kind", ["SGD momentum", "AdamW amsgrad", "AdamW foreach", "AdamW fused", "Adagrad"])
@ranks(1)
def test_on_one_rank_it_is_the_same_bit_for_bit(kind: str) -> None:
    """Every loss and every parameter, in single precision: with one shard each, the same ops are done on the same."""
    plain = model(torch.float32)
    twin = sharded(plain, chunks(0, 0), chunks(1, 0))
    ours, theirs = make(kind, named(twin), ShardedOptimizer), make(kind, plain.parameters())
    data = batches(5, torch.float32)
    assert train(twin, ours, data) == train(plain, theirs, data)
    for name, parameter in plain.named_parameters():
        assert torch.equal(whole(twin.get_parameter(name)), parameter), name


@ranks(4)
def test_muon_sees_whole_matrices() -> None:
    """Orthogonal updates of sharded matrices, as of plain ones; and no shard is taken for a matrix.

    It computes in bfloat16, but on the same matrices in the same way: of what it is given, 1e-17 apart, one value in
    1e14 is rounded to another bfloat16.
    """
    plain = model()
    twin = sharded(plain, ALL["grid"], chunks(0, 0, 1, 2))
    matrices = [name for name, parameter in plain.named_parameters() if parameter.ndim == 2]
    ours = ShardedOptimizer(named(twin, matrices.__contains__), torch.optim.Muon, lr=0.1)
    theirs = torch.optim.Muon([plain.get_parameter(name) for name in matrices], lr=0.1)
    data = batches(3)
    losses = [train(one, step, data) for one, step in ((twin, ours), (plain, theirs))]
    assert losses[0] == pytest.approx(losses[1], rel=ROUNDING)
    assert_same(twin, plain)
