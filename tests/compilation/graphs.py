"""A backend of `torch.compile` that counts its graphs and runs them as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func


class Counter:
    """Graphs of forwards and backwards that were compiled, and their ops."""

    def __init__(self) -> None:
        self.forwards: list[torch.fx.GraphModule] = []
        self.backwards: list[torch.fx.GraphModule] = []
        self._compile = aot_autograd(fw_compiler=self._forward, bw_compiler=self._backward)

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Compile, as a backend does."""
        return self._compile(graph, inputs)

    def _forward(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.forwards.append(graph)
        return make_boxed_func(graph.forward)

    def _backward(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        self.backwards.append(graph)
        return make_boxed_func(graph.forward)

    @property
    def counts(self) -> tuple[int, int]:
        """How many graphs of each there are."""
        return len(self.forwards), len(self.backwards)


def transfers(graph: torch.fx.GraphModule) -> list[str]:
    """What the transfers of a graph do, in order."""
    found = torch.ops.shardwise.transfer.default
    return [str(node.args[-1]).rpartition(" ")[0] for node in graph.graph.nodes if node.target is found]
