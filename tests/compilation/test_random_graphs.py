"""Graphs made at random, whose transfers begin early and end late: values and the order of transfers stay."""

from __future__ import annotations

import operator
import random
from typing import Any

import pytest
import torch
from torch import fx

from shardwise.compilation.full_graph.early_transfers import MOST, begin_early

aten, ops = torch.ops.aten, torch.ops.shardwise
SIZE = (3, 3)


def meta(*size: int) -> torch.Tensor:
    """What a node of a graph says of its value."""
    return torch.empty(size, device="meta", dtype=torch.float64)


class RandomGraph:
    """Products, sums, views and transfers, whose results are used, only returned, or neither."""

    def __init__(self, seed: int) -> None:
        self.random, self.graph = random.Random(seed), fx.Graph()
        self.token = self._with_value(self.graph.placeholder("token"), meta())
        self.values = [self._with_value(self.graph.placeholder(f"x{k}"), meta(*SIZE)) for k in range(3)]
        self.returned: list[fx.Node] = []
        for number in range(self.random.randint(6, 30)):
            self._add(number)
        self.graph.output((self.token, *self.returned, *(one for one in self.values if not one.users)))

    def _with_value(self, node: fx.Node, value: Any) -> fx.Node:
        node.meta["val"] = value
        return node

    def _any(self) -> fx.Node:
        return self.random.choice(self.values[-self.random.randint(1, 8) :])

    def _add(self, number: int) -> None:
        kind = self.random.choices(("mm", "add", "t", "transfer"), (45, 20, 10, 25))[0]
        if kind == "transfer":
            self._add_transfer(number)
            return
        op, count = {"mm": (aten.mm.default, 2), "add": (aten.add.Tensor, 2), "t": (aten.t.default, 1)}[kind]
        node = self.graph.call_function(op, tuple(self._any() for _ in range(count)))
        self.values.append(self._with_value(node, meta(*SIZE)))

    def _add_transfer(self, number: int) -> None:
        operands = [self._any() for _ in range(self.random.randint(1, 2))]
        node = self.graph.call_function(ops.transfer.default, (self.token, operands, str(number)))
        node.meta["val"] = [meta(), *(meta(*SIZE) for _ in operands)]
        self.token = self._with_value(self.graph.call_function(operator.getitem, (node, 0)), meta())
        results = [
            self._with_value(self.graph.call_function(operator.getitem, (node, k + 1)), meta(*SIZE))
            for k in range(len(operands))
            if self.random.random() < 0.85
        ]
        (self.returned if self.random.random() < 0.35 else self.values).extend(results)


class Interpreter(fx.Interpreter):
    """Runs a graph whose transfers double their operands, the halves at their places."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.begun: list[str] = []
        self.under_way: dict[int, list[torch.Tensor]] = {}
        self.tokens: list[torch.Tensor] = []  # alive, so that ids stay unique
        self.products_under_way = 0

    def run_node(self, n: fx.Node) -> Any:
        """One node."""
        args, _ = self.fetch_args_kwargs_from_env(n)
        if n.target is ops.own_memory.default:
            return args[0].clone()
        if n.target in (ops.transfer.default, ops.begin.default):
            self.begun.append(args[2])
            self.tokens.append(torch.zeros(()))
            if n.target is ops.transfer.default:
                return [self.tokens[-1], *(2 * one for one in args[1])]
            self.under_way[id(self.tokens[-1])] = [one.clone() for one in args[1]]
            assert len(self.under_way) <= MOST
            return [self.tokens[-1], *(torch.full_like(one, torch.nan) for one in args[1])]
        if n.target is ops.finish.default:
            operands = self.under_way.pop(id(args[1]))
            for out, node in zip(args[2], n.args[2], strict=True):
                out.copy_(2 * operands[node.args[1] - 1])
            return torch.zeros(())
        self.products_under_way += n.target is aten.mm.default and bool(self.under_way)
        return super().run_node(n)


def run(seed: int, **options: Any) -> tuple[Interpreter, list[torch.Tensor]]:
    """The results of a graph, changed with these options if there are any."""
    module = fx.GraphModule({}, RandomGraph(seed).graph)
    if options:
        begin_early(module, **options)
    interpreter, generator = Interpreter(module), torch.Generator().manual_seed(seed)
    inputs = [torch.randn(SIZE, dtype=torch.float64, generator=generator) for _ in range(3)]
    return interpreter, interpreter.run(torch.zeros(()), *inputs)[1:]


@pytest.mark.parametrize("delays", [False, True])
def test_values_and_the_order_of_transfers_stay(delays: bool) -> None:
    """Each transfer that begins ends, and products are computed meanwhile."""
    overlapped = 0
    for seed in range(300):
        before, expected = run(seed)
        after, found = run(seed, delays=delays)
        assert after.begun == before.begun, seed
        assert not after.under_way, seed
        overlapped += after.products_under_way
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=str(seed))
    assert overlapped > 300
