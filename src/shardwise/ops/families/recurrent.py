"""Recurrent layers: RNN, GRU and LSTM, their cells, and packed sequences.

Samples go apart, where all weights may be whole on every rank. Else a layer is broken down into steps: its states lie
in chunks of their features, its weights come once into the chunks that a product with these wants, and a step costs
one sum of partial products.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from shardwise import settings
from shardwise.errors import UnsupportedOpError
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.chunking import in_chunks
from shardwise.ops.engine.compute import compute, expect
from shardwise.ops.engine.gathered import compute_gathered, needs_whole
from shardwise.ops.engine.rule import Labels, Rule
from shardwise.ops.engine.table import CAST_WITHIN, TABLE
from shardwise.sharded_tensor import ShardedTensorBase

aten = torch.ops.aten
States = list[Any]  # of one direction of one layer: the hidden state, and an LSTM's cell state


# One step ------------------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A kind of recurrent layer: how many gates it has, and what it makes of them and its states."""

    gates: int
    update: Callable[[Any, Any, States], States]  # of what input and hidden state give each gate


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


LSTM, GRU = Kind(4, _lstm), Kind(3, _gru)
RNN_TANH, RNN_RELU = Kind(1, _rnn(torch.tanh)), Kind(1, _rnn(torch.relu))


class Cell:
    """One direction of one layer, with its weights where its steps want them."""

    def __init__(self, kind: Kind, params: Sequence[Any], has_biases: bool, x: Any) -> None:
        self.kind = kind
        w_ih, w_hh, *rest = params
        biases = [rest.pop(0), rest.pop(0)] if has_biases else [None, None]
        self.projection = in_chunks(rest[0], 1) if rest else None
        inner = 2 if isinstance(x, ShardedTensorBase) else 1  # features that are cut are summed over
        self.w_ih = in_chunks(self._by_gate(w_ih), inner)
        self.w_hh = in_chunks(self._by_gate(w_hh), 2)
        self.b_ih, self.b_hh = (None if one is None else in_chunks(self._by_gate(one), 1) for one in biases)

    def _by_gate(self, tensor: Any) -> Any:
        """Rows of each gate apart: ``[gate, feature, ...]``."""
        if not isinstance(tensor, ShardedTensorBase):
            return tensor.unflatten(0, (self.kind.gates, -1))
        return torch.stack(tensor.chunk(self.kind.gates))

    def _product(self, x: Any, weight: Any, bias: Any) -> Any:
        """For each gate, each row of the input times the weight: ``[gate, row, feature]``."""
        made = torch.bmm(x.expand(self.kind.gates, *x.shape), weight.transpose(1, 2))
        made = in_chunks(made, 2)
        return made if bias is None else made + bias.unsqueeze(1)

    def given(self, x: Any) -> Any:
        """What rows of the input give each gate."""
        return self._product(x, self.w_ih, self.b_ih)

    def step(self, given: Any, states: States) -> States:
        """The states after one step."""
        made = self.kind.update(given, self._product(states[0], self.w_hh, self.b_hh), states)
        if self.projection is not None:
            made[0] = in_chunks(torch.mm(made[0], self.projection.t()), 1)
        return made


# All steps -----------------------------------------------------------------------------------------------------------


def _direction(cell: Cell, x: Any, batches: Sequence[int], states: States, *, backward: bool) -> tuple[Any, States]:
    """The outputs of all steps, one behind another, and the last states; a step has so many samples."""
    given = cell.given(x)
    begins = [0, *itertools.accumulate(batches)]
    steps = range(len(batches))
    outputs: list[Any] = [None] * len(batches)
    initial = states
    ended: list[States] = []  # of sequences that are over, the last to end first
    states = [one[: batches[-1 if backward else 0]] for one in states]
    for t in reversed(steps) if backward else steps:
        count, had = batches[t], states[0].shape[0]
        if count < had:
            ended.insert(0, [one[count:] for one in states])
            states = [one[:count] for one in states]
        elif count > had:
            states = [torch.cat([one, first[had:count]]) for one, first in zip(states, initial, strict=True)]
        states = cell.step(given[:, begins[t] : begins[t] + count], states)
        outputs[t] = states[0]
    last = [torch.cat(list(parts)) for parts in zip(states, *ended, strict=True)] if ended else states
    return torch.cat(outputs), last


def _layers(kind: Kind, call: Call, x: Any, batches: Sequence[int]) -> tuple[Any, list[Any]]:
    """The outputs of the last layer, as rows, and the last states of all layers."""
    initial = call["hx"] if isinstance(call["hx"], list | tuple) else [call["hx"]]
    initial = [in_chunks(one, 2) for one in initial]
    directions = 2 if call["bidirectional"] else 1
    params, count = call["params"], len(call["params"]) // (directions * call["num_layers"])
    ends: list[States] = []
    for layer in range(call["num_layers"]):
        if layer and call["dropout"] and call["train"]:
            x = functional.dropout(x, call["dropout"])
        x = in_chunks(x, 1)
        made = []
        for direction in range(directions):
            number = layer * directions + direction
            cell = Cell(kind, params[number * count : (number + 1) * count], call["has_biases"], x)
            states = [one[number] for one in initial]
            found, last = _direction(cell, x, batches, states, backward=direction == 1)
            made.append(found)
            ends.append(last)
        x = torch.cat(made, 1) if directions == 2 else made[0]
    return x, [torch.stack(list(each)) for each in zip(*ends, strict=True)]


def _samples(call: Call) -> Rule | None:
    """Samples go apart; all else is whole."""
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
    found = expect(call)
    results = [dims(size, x.ndim - 2 if number or x.ndim == 2 else at) for number, (size, _) in enumerate(found)]
    return labels.rule(operands, results, contiguous=True)  # as cuDNN wants them


class _Layers(Call):
    """A call of recurrent layers, of whose weights, in pieces, cuDNN does not complain that they lie apart."""

    def run(self, operands: Sequence[torch.Tensor], **changes: Any) -> Any:
        """The layers on these tensors, by torch's own function: warnings within it come out of it."""
        function = getattr(torch, self.op.overloadpacket.__name__)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
            return function(*self.bound(operands, **changes).values())


def _recurrence(kind: Kind) -> Callable[[Call], Any]:
    """A layer, or several: on samples, else step by step."""

    def handler(call: Call) -> Any:
        rule = _samples(call)
        found = NotImplemented if rule is None else compute(_Layers(call.op, *call.as_given()), rule)
        if found is not NotImplemented:
            return found
        x = call["input"]
        x = in_chunks(x.transpose(0, 1) if call["batch_first"] else x, 2)
        steps, samples = x.shape[:2]
        made, ends = _layers(kind, call, x.reshape(steps * samples, -1), [samples] * steps)
        made = made.unflatten(0, (steps, samples))
        return made.transpose(0, 1) if call["batch_first"] else made, *ends

    return handler


def _packed(kind: Kind) -> Callable[[Call], Any]:
    """Sequences of different lengths, packed: all samples of a step, one step behind another."""

    def handler(call: Call) -> Any:
        if isinstance(call["batch_sizes"], ShardedTensorBase):
            return NotImplemented
        with suppress(UnsupportedOpError):  # beyond the budget
            return compute_gathered(call.op, (), call.arguments, needs_whole(call))
        made, ends = _layers(kind, call, in_chunks(call["data"], 1), call["batch_sizes"].tolist())
        return made, *ends

    return handler


def _single(kind: Kind) -> Callable[[Call], Any]:
    """A cell: one step."""

    def handler(call: Call) -> Any:
        rule = _samples(call)
        found = NotImplemented if rule is None else compute(call, rule)
        if found is not NotImplemented:
            return found
        x, hx = in_chunks(call["input"], 1), call["hx"]
        states = [in_chunks(one, 1) for one in (hx if isinstance(hx, list | tuple) else [hx])]
        params: Iterable[Any] = (call[name] for name in ("w_ih", "w_hh", "b_ih", "b_hh"))
        cell = Cell(kind, [one for one in params if one is not None], call["b_ih"] is not None, x)
        made = cell.step(cell.given(x), states)
        return tuple(made) if isinstance(hx, list | tuple) else made[0]

    return handler


for _name, _kind in {"lstm": LSTM, "gru": GRU, "rnn_tanh": RNN_TANH, "rnn_relu": RNN_RELU}.items():
    TABLE[getattr(aten, _name).input] = _recurrence(_kind)
    TABLE[getattr(aten, _name).data] = _packed(_kind)
    TABLE[getattr(aten, f"{_name}_cell")] = _single(_kind)
    CAST_WITHIN.add(getattr(aten, f"{_name}_cell").default)
