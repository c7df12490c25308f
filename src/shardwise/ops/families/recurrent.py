"""Recurrent layers: RNN, GRU and LSTM, their cells, and packed sequences.

Samples may be cut if all weights may be whole on every rank. Else a layer is computed step by step: states are in
chunks of their features, weights are redistributed once to fit a product with the states, and each step sums partial
products.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from shardwise import settings
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.chunking import chunked
from shardwise.ops.engine.compute import compute
from shardwise.ops.engine.gathered import try_gathered
from shardwise.ops.engine.result_metadata import expected_results
from shardwise.ops.engine.rule import Labels, Rule
from shardwise.ops.engine.table import DECOMPOSED_UNDER_AUTOCAST, TABLE
from shardwise.tensor import ShardedTensorBase

aten = torch.ops.aten
States = list[Any]  # of one direction of one layer: the hidden state, and an LSTM's cell state


# One step ------------------------------------------------------------------------------------------------------------


class LayerType(NamedTuple):
    """A type of recurrent layer: the number of its gates, and the update of its states."""

    gates: int
    update: Callable[[Any, Any, States], States]  # from the products of input and hidden state for each gate


def _lstm(given: Any, recurrent: Any, states: States) -> States:
    enter, forget, new, out = (given + recurrent).unbind(0)
    cell = forget.sigmoid() * states[1] + enter.sigmoid() * new.tanh()
    return [out.sigmoid() * cell.tanh(), cell]


def _gru(given: Any, recurrent: Any, states: States) -> States:
    reset, update = (given[:2] + recurrent[:2]).sigmoid().unbind(0)
    new = (given[2] + reset * recurrent[2]).tanh()
    return [new + update * (states[0] - new)]


def _rnn(function: Callable[[Any], Any]) -> Callable[[Any, Any, States], States]:
    return lambda given, recurrent, states: [function((given + recurrent)[0])]


LSTM, GRU = LayerType(4, _lstm), LayerType(3, _gru)
RNN_TANH, RNN_RELU = LayerType(1, _rnn(torch.tanh)), LayerType(1, _rnn(torch.relu))


class Cell:
    """One direction of one layer, with its weights as the steps need them."""

    def __init__(self, kind: LayerType, params: Sequence[Any], has_biases: bool, x: Any) -> None:
        self.kind = kind
        w_ih, w_hh, *rest = params
        biases = [rest.pop(0), rest.pop(0)] if has_biases else [None, None]
        self.projection = chunked(rest[0], 1) if rest else None
        inner = 2 if isinstance(x, ShardedTensorBase) else 1  # cut features are summed over
        self.w_ih = chunked(self._by_gate(w_ih), inner)
        self.w_hh = chunked(self._by_gate(w_hh), 2)
        self.b_ih, self.b_hh = (None if one is None else chunked(self._by_gate(one), 1) for one in biases)

    def _by_gate(self, tensor: Any) -> Any:
        """A weight as ``[gate, feature, ...]``."""
        if not isinstance(tensor, ShardedTensorBase):
            return tensor.unflatten(0, (self.kind.gates, -1))
        return torch.stack(tensor.chunk(self.kind.gates))

    def _product(self, x: Any, weight: Any, bias: Any) -> Any:
        """Each row of the input times the weight of each gate: ``[gate, row, feature]``."""
        result = torch.bmm(x.expand(self.kind.gates, *x.shape), weight.transpose(1, 2))
        result = chunked(result, 2)
        return result if bias is None else result + bias.unsqueeze(1)

    def input_products(self, x: Any) -> Any:
        """The products of rows of the input for each gate."""
        return self._product(x, self.w_ih, self.b_ih)

    def step(self, products: Any, states: States) -> States:
        """The states after one step."""
        result = self.kind.update(products, self._product(states[0], self.w_hh, self.b_hh), states)
        if self.projection is not None:
            result[0] = chunked(torch.mm(result[0], self.projection.t()), 1)
        return result


# All steps -----------------------------------------------------------------------------------------------------------


def _direction(cell: Cell, x: Any, batches: Sequence[int], states: States, *, backward: bool) -> tuple[Any, States]:
    """The outputs of all steps, concatenated, and the last states. ``batches`` are the samples of each step."""
    products = cell.input_products(x)
    begins = [0, *itertools.accumulate(batches)]
    steps = range(len(batches))
    outputs: list[Any] = [None] * len(batches)
    initial = states
    ended: list[States] = []  # of sequences that have ended, the last to end first
    states = [one[: batches[-1 if backward else 0]] for one in states]
    for t in reversed(steps) if backward else steps:
        count, had = batches[t], states[0].shape[0]
        if count < had:
            ended.insert(0, [one[count:] for one in states])
            states = [one[:count] for one in states]
        elif count > had:
            states = [torch.cat([one, first[had:count]]) for one, first in zip(states, initial, strict=True)]
        states = cell.step(products[:, begins[t] : begins[t] + count], states)
        outputs[t] = states[0]
    last = [torch.cat(list(parts)) for parts in zip(states, *ended, strict=True)] if ended else states
    return torch.cat(outputs), last


def _layers(kind: LayerType, call: Call, x: Any, batches: Sequence[int]) -> tuple[Any, list[Any]]:
    """The outputs of the last layer, as rows, and the last states of all layers."""
    initial = call["hx"] if isinstance(call["hx"], list | tuple) else [call["hx"]]
    initial = [chunked(one, 2) for one in initial]
    directions = 2 if call["bidirectional"] else 1
    params, count = call["params"], len(call["params"]) // (directions * call["num_layers"])
    ends: list[States] = []
    for layer in range(call["num_layers"]):
        if layer and call["dropout"] and call["train"]:
            x = functional.dropout(x, call["dropout"])
        x = chunked(x, 1)
        results = []
        for direction in range(directions):
            number = layer * directions + direction
            cell = Cell(kind, params[number * count : (number + 1) * count], call["has_biases"], x)
            states = [one[number] for one in initial]
            result, last = _direction(cell, x, batches, states, backward=direction == 1)
            results.append(result)
            ends.append(last)
        x = torch.cat(results, 1) if directions == 2 else results[0]
    return x, [torch.stack(list(each)) for each in zip(*ends, strict=True)]


def _samples(call: Call) -> Rule | None:
    """Samples may be cut; all else is whole."""
    draws = call.arguments.get("dropout") and call["train"] and call["num_layers"] > 1
    if draws and (not settings.current().own_draws or any(one._layout.has_replicas for one in call.sharded())):
        return None  # the kernels draw by the position in the shard
    labels = Labels()
    x = call["input"]
    at = 0 if x.ndim == 2 or call["batch_first"] else 1
    sample = labels.new(x.shape[at])

    def dims(shape: Sequence[int], at: int) -> list[Any]:
        return [sample if dim == at else labels.new(extent, whole=True) for dim, extent in enumerate(shape)]

    hidden = len(call["hx"]) if isinstance(call["hx"], list | tuple) else 1
    operands = [dims(x.shape, at)]
    for number, shape in enumerate(call.shapes[1:]):
        operands.append(dims(shape, x.ndim - 2 if number < hidden else -1))
    expected = expected_results(call)
    results = [dims(size, x.ndim - 2 if number or x.ndim == 2 else at) for number, (size, _) in enumerate(expected)]
    return labels.rule(operands, results, contiguous=True)  # for cuDNN


class _Layers(Call):
    """A call of recurrent layers without cuDNN's warning that the weights are not in one chunk of memory."""

    def run(self, operands: Sequence[torch.Tensor], **changes: Any) -> Any:
        """The layers on these tensors, by the Python function, in which warnings can be caught."""
        function = getattr(torch, self.op.overloadpacket.__name__)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
            return function(*self.with_operands(operands, **changes).values())


def _recurrence(kind: LayerType) -> Callable[[Call], Any]:
    """One or several layers: by samples, else step by step."""

    def handler(call: Call) -> Any:
        result = compute(_Layers(call.op, *call.split_arguments()), _samples(call))
        if result is not NotImplemented:
            return result
        x = call["input"]
        x = chunked(x.transpose(0, 1) if call["batch_first"] else x, 2)
        steps, samples = x.shape[:2]
        made, ends = _layers(kind, call, x.reshape(steps * samples, -1), [samples] * steps)
        made = made.unflatten(0, (steps, samples))
        return made.transpose(0, 1) if call["batch_first"] else made, *ends

    return handler


def _packed(kind: LayerType) -> Callable[[Call], Any]:
    """Layers on a packed sequence."""

    def handler(call: Call) -> Any:
        if isinstance(call["batch_sizes"], ShardedTensorBase):
            return NotImplemented
        gathered = try_gathered(call)
        if gathered is not NotImplemented:
            return gathered
        result, ends = _layers(kind, call, chunked(call["data"], 1), call["batch_sizes"].tolist())
        return result, *ends

    return handler


def _single(kind: LayerType) -> Callable[[Call], Any]:
    """A cell: one step of a layer."""

    def handler(call: Call) -> Any:
        result = compute(call, _samples(call))
        if result is not NotImplemented:
            return result
        x, hx = chunked(call["input"], 1), call["hx"]
        states = [chunked(one, 1) for one in (hx if isinstance(hx, list | tuple) else [hx])]
        params: Iterable[Any] = (call[name] for name in ("w_ih", "w_hh", "b_ih", "b_hh"))
        cell = Cell(kind, [one for one in params if one is not None], call["b_ih"] is not None, x)
        made = cell.step(cell.input_products(x), states)
        return tuple(made) if isinstance(hx, list | tuple) else made[0]

    return handler


# Packed sequences: torch says which row goes where, and the rows are picked ------------------------------------------


def _pack_padded(call: Call) -> Any:
    """The rows of all samples, step by step, and the number of samples of each step."""
    x, lengths, batch_first = call["input"], call["lengths"], call["batch_first"]
    if isinstance(lengths, ShardedTensorBase) or x.ndim < 2:
        return NotImplemented
    numbers = torch.arange(x.shape[0] * x.shape[1], device="cpu").reshape(*x.shape[:2], 1)
    rows, batch_sizes = aten._pack_padded_sequence(numbers, lengths, batch_first)  # raises as torch does
    return x.flatten(0, 1).index_select(0, rows.flatten().to(x.device)), batch_sizes


def _pad_packed(call: Call) -> Any:
    """A row for each step of each sample, and the length of each sample."""
    data, batch_sizes = call["data"], call["batch_sizes"]
    if isinstance(batch_sizes, ShardedTensorBase):
        return NotImplemented
    numbers = torch.arange(1, len(data) + 1, device="cpu").reshape(-1, 1)
    rows, lengths = aten._pad_packed_sequence(numbers, batch_sizes, call["batch_first"], 0, call["total_length"])
    rows = rows.squeeze(-1).to(data.device)
    result = data.index_select(0, (rows - 1).clamp(min=0).flatten()).unflatten(0, rows.shape)
    empty = (rows == 0).reshape(*rows.shape, *[1] * (data.ndim - 1))
    return result.masked_fill(empty, call["padding_value"]), lengths


for _name, _kind in {"lstm": LSTM, "gru": GRU, "rnn_tanh": RNN_TANH, "rnn_relu": RNN_RELU}.items():
    TABLE[getattr(aten, _name).input] = _recurrence(_kind)
    TABLE[getattr(aten, _name).data] = _packed(_kind)
    TABLE[getattr(aten, f"{_name}_cell")] = _single(_kind)
    DECOMPOSED_UNDER_AUTOCAST.add(getattr(aten, f"{_name}_cell").default)
TABLE[aten._pack_padded_sequence] = _pack_padded
TABLE[aten._pad_packed_sequence] = _pad_packed
