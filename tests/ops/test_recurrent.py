"""Recurrent layers with nothing gathered: their weights are cut, and every gradient is that of the plain twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ops.twin import (
    COLUMNS,
    TWO,
    Layouts,
    along,
    assert_alike,
    assert_same_module,
    go_back,
    normal,
    plain,
    sharded,
)
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import shardwise
from shardwise.testing import ranks

LAYERS: dict[str, Callable[..., nn.RNNBase]] = {
    "RNN": nn.RNN,
    "RNN, relu": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="relu", **kwargs),
    "GRU": nn.GRU,
    "LSTM": nn.LSTM,
}
X = (5, 3, 4)  # steps, samples, features


def with_states(module: Any, x: Any, *states: Any) -> Any:
    """An LSTM takes two states, others one."""
    return module(x, tuple(states) if isinstance(module, nn.LSTM | nn.LSTMCell) else states[0])


def packed(module: Any, x: Any) -> Any:
    """Sequences of 5, 3 and 2 steps."""
    outputs, ends = module(pack_padded_sequence(x, torch.tensor([5, 3, 2])))
    return outputs.data, ends


def states(kind: str, *size: int, layouts: Layouts = plain) -> list[tuple[torch.Tensor, Layouts]]:
    """States to begin with."""
    return [(normal(*size, seed=k), layouts) for k in range(2 if kind.startswith("LSTM") else 1)]


# They differ in their gates, and are cut alike: the one with most gates and states on all layouts.
SOME = {"RNN": ("several per rank", "uneven"), "RNN, relu": ("uneven",), "GRU": ("rows", "columns", "uneven")}
CASES = [(layout, kind) for kind in LAYERS for layout in SOME.get(kind, TWO)]


@pytest.mark.parametrize(("layout", "kind"), CASES)
@ranks(2)
def test_layers(layout: str, kind: str) -> None:
    """One layer and two, in one direction and two, with states that are given or not, with and without biases."""
    make, layouts = LAYERS[kind], TWO[layout]
    assert_same_module(lambda: make(4, 6), [(normal(*X), plain)], layouts, kind)
    assert_same_module(
        lambda: make(4, 6, num_layers=2, bidirectional=True, batch_first=True),
        [(normal(*X), plain), *states(kind, 4, 5, 6)],
        layouts,
        f"{kind}, two layers, both ways",
        with_states,
    )
    assert_same_module(
        lambda: make(4, 6, bias=False),
        [(normal(*X), along(1, 0, 1)), *states(kind, 1, 3, 6, layouts=along(2, 1, 0))],
        layouts,
        f"{kind} without biases, all sharded",
        with_states,
    )


@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
@ranks(4)
def test_inputs_that_are_sharded(kind: str) -> None:
    """By steps, samples or features, on four ranks; the weights by rows."""
    for dim in range(3):
        x = (normal(*X), along(dim, 0, 1, 2, 3))
        assert_same_module(lambda: LAYERS[kind](4, 6), [x], along(0, 3, 2, 1, 0), f"{kind}, dim {dim}")


@pytest.mark.parametrize("kind", LAYERS)
@ranks(2)
def test_packed_sequences(kind: str) -> None:
    """Each sequence ends where it ends, both ways."""
    for layout in ("rows", "uneven"):
        assert_same_module(
            lambda: LAYERS[kind](4, 6, num_layers=2, bidirectional=True),
            [(normal(*X), plain)],
            TWO[layout],
            f"{kind}, {layout}",
            packed,
        )


@ranks(2)
def test_projections() -> None:
    """An LSTM whose hidden state is smaller than its cell state."""
    for kind, layouts in TWO.items():
        assert_same_module(
            lambda: nn.LSTM(4, 6, proj_size=3, num_layers=2, bidirectional=True), [(normal(*X), plain)], layouts, kind
        )


@ranks(2)
def test_cells() -> None:
    """LSTMCell, GRUCell and RNNCell, with samples or one alone."""
    try_cells(*TWO)


@ranks(4)
def test_cells_beside_ranks_without_shards() -> None:
    """The same, on two of four ranks."""
    try_cells("uneven", "replicated")


def try_cells(*kinds: str) -> None:
    """All cells, with their weights in these layouts."""
    for cell in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        for kind in kinds:
            layouts = TWO[kind]
            assert_same_module(lambda: cell(4, 6), [(normal(3, 4), plain)], layouts, f"{cell.__name__}, {kind}")  # noqa: B023 - called at once
            assert_same_module(
                lambda: cell(4, 6, bias=False),  # noqa: B023 - called at once
                [(normal(3, 4), COLUMNS), *states(cell.__name__, 3, 6, layouts=COLUMNS)],
                layouts,
                f"{cell.__name__}, {kind}, all sharded",
                with_states,
            )
            assert_same_module(lambda: cell(4, 6), [(normal(4), plain)], layouts, f"{cell.__name__}, {kind}, one")  # noqa: B023 - called at once


@ranks(2)
def test_samples_go_apart_where_weights_are_whole() -> None:
    """Plain weights and sharded samples: nothing travels on the way there, and results lie as the samples do."""
    torch.manual_seed(0)
    module = nn.LSTM(4, 6).double()
    x = normal(*X)
    tensor, twin = sharded(x, along(1, 0, 1)), sharded(x, plain)
    with shardwise.gather_budget(0):
        found = module(tensor)
        assert found[0].sharding_spec() == along(1, 0, 1)(x.shape)
        losses = assert_alike(found, module(twin), "LSTM on samples")
        go_back(losses, [(tensor, twin)], "LSTM on samples")


@ranks(2)
def test_dropout_between_layers_is_drawn() -> None:
    """Two calls differ while training, and not after."""
    module = nn.GRU(4, 6, num_layers=2, dropout=0.5)
    for name, parameter in list(module.named_parameters()):
        shardwise.nn.shard_parameter(module, name, TWO["rows"](parameter.shape))
    x = torch.ones(X)
    with shardwise.gather_budget(0):
        torch.manual_seed(0)
        first, second = module(x)[0].full_tensor(), module(x)[0].full_tensor()
        assert not torch.equal(first, second)
        module.eval()
        assert torch.equal(module(x)[0].full_tensor(), module(x)[0].full_tensor())
