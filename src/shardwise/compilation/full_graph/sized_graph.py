"""`SizedGraph`: a graph of local tensors for many sizes, whose first inputs are integers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped] # torch's own dependency
import torch
from torch import fx

from shardwise.compilation.full_graph.graph_ops import transfer_list
from shardwise.compilation.full_graph.graph_outline import GraphOutline, arguments_of, is_transfer, tensor_in_order
from shardwise.torch_private import FakeTensorMode, load_private, pytree


class SizeColumns(NamedTuple):
    """Which integers of a graph are the same for all sizes that were seen, and which of the others go together."""

    numbers: tuple[int | None, ...]  # for each integer that of its column; None if it is the same for all sizes
    first: tuple[int, ...]  # for each column, the place of its first integer

    @classmethod
    def of(cls, seen: Sequence[tuple[int, ...]]) -> SizeColumns:
        """Of the integers of all sizes."""
        places: dict[tuple[int, ...], int] = {}
        for k, column in enumerate(zip(*seen, strict=True)):
            if len(set(column)) > 1:
                places.setdefault(column, k)
        order = {column: k for k, column in enumerate(places)}
        return cls(tuple(order.get(column) for column in zip(*seen, strict=True)), tuple(places.values()))

    def values(self, integers: Sequence[int]) -> list[int]:
        """The integer of each column."""
        return [integers[k] for k in self.first]

    def fit(self, integers: Sequence[int], others: Sequence[int]) -> bool:
        """Whether these integers differ from others only as the columns say."""
        values = self.values(integers)
        pairs = zip(integers, others, self.numbers, strict=True)
        return all(one == (other if number is None else values[number]) for one, other, number in pairs)


class SizedGraph:
    """A graph with an integer of each column, and the number of a list of transfers, as its first inputs."""

    def __init__(
        self, module: fx.GraphModule, inputs: Sequence[torch.Tensor], outline: GraphOutline, columns: SizeColumns
    ) -> None:
        """Of a graph of one size, and its inputs."""
        self._outline, self._columns = outline, columns
        self._env: Any = load_private("torch.fx.experimental.symbolic_shapes.ShapeEnv")()
        self.mode = FakeTensorMode(shape_env=self._env)
        self.sizes = [self._symbol(value, k) for k, value in enumerate(self._values(outline))]
        self._symbols = [size.node.expr for size in self.sizes]
        self._rest = iter(zip(outline.integers, columns.numbers, strict=True))
        self._graph, self._nodes = fx.Graph(), dict[fx.Node, fx.Node]()
        self._inputs_of_sizes = {id(size): self._size_input(size, k) for k, size in enumerate(self.sizes)}
        with self.mode, torch.no_grad():
            pairs = zip(inputs, outline.orders, strict=True)
            self.tensors = [tensor_in_order(order, [self._next() for _ in one.shape], one) for one, order in pairs]
            self._copy(module.graph)
        self.module = fx.GraphModule(module, self._graph)

    def values_for(self, outline: GraphOutline) -> list[int] | None:
        """The integers to be given for another graph, if all is true of them that was taken for granted so far."""
        ours = self._outline
        if (outline.orders, outline.is_aligned) != (ours.orders, ours.is_aligned):
            return None
        if not self._columns.fit(outline.integers, ours.integers):
            return None
        values = self._values(outline)
        known = {symbol: sympy.Integer(value) for symbol, value in zip(self._symbols, values, strict=True)}
        env = self._env
        holds = (
            all(one in env.var_to_range[symbol] for symbol, one in known.items())
            and all(env.replacements[one].xreplace(known) == known[one] for one in known if one in env.replacements)
            and all(guard.expr.xreplace(known) == True for guard in env.guards)  # noqa: E712 # not a bool of Python
        )
        return values if holds else None

    def _values(self, outline: GraphOutline) -> list[int]:
        return [*self._columns.values(outline.integers), transfer_list(outline.transfers)]

    def _symbol(self, value: int, number: int) -> Any:
        """An integer that a compiler knows no value of: at least 2, or anything if this one is less."""
        source = load_private("torch._dynamo.source.ConstantSource")(f"size_{number}")
        kind = load_private("torch.fx.experimental.symbolic_shapes.DimDynamic").DYNAMIC
        create = self._env.create_symbol if value > 1 else self._env.create_unspecified_symbol
        return self._env.create_symintnode(create(value, source, kind), hint=value, source=source)

    def _size_input(self, size: Any, number: int) -> fx.Node:
        node = self._graph.placeholder(f"size_{number}")
        node.meta["val"] = size
        return node

    def _next(self) -> Any:
        """The next integer of the graph, or what takes its place."""
        integer, number = next(self._rest)
        return integer if number is None else self.sizes[number]

    def _copy(self, graph: fx.Graph) -> None:
        """Copy the nodes of a graph, and work out what each gives."""
        tensors, transfers = iter(self.tensors), iter(range(len(self._outline.transfers)))
        for old in graph.nodes:
            leaves, structure = pytree.tree_flatten(arguments_of(old))
            leaves = [self._next() if type(leaf) is int else leaf for leaf in leaves]
            target: Any = old.target
            if is_transfer(old):
                args, kwargs = pytree.tree_unflatten(leaves, structure)
                args = (*args, self.sizes[-1], next(transfers))
                leaves, structure = pytree.tree_flatten((args, kwargs))
                target = torch.ops.shardwise.transfer_of_size.default
            args, kwargs = pytree.tree_unflatten([self._node(leaf) for leaf in leaves], structure)
            new = self._graph.create_node(old.op, target, args, kwargs, old.name)
            new.meta.update(old.meta)
            self._nodes[old] = new
            if old.op == "placeholder":
                new.meta["val"] = next(tensors)
            elif old.op == "call_function":
                args, kwargs = pytree.tree_unflatten([self._value(leaf) for leaf in leaves], structure)
                new.meta["val"] = target(*args, **kwargs)
                if "eager_input_vals" in new.meta:  # by which inductor tells how arguments must lie in memory
                    new.meta["eager_input_vals"] = args, kwargs
            else:  # what comes after the graph expects its outputs to lie in memory as they do for this size
                results = enumerate(pytree.tree_leaves(args))
                new.meta["user_visible_output_idxs"] = [k for k, one in results if isinstance(one, fx.Node)]

    def _node(self, leaf: Any) -> Any:
        """In the new graph, what stands for a node or a size."""
        return self._nodes[leaf] if isinstance(leaf, fx.Node) else self._inputs_of_sizes.get(id(leaf), leaf)

    def _value(self, leaf: Any) -> Any:
        return self._nodes[leaf].meta["val"] if isinstance(leaf, fx.Node) else leaf
