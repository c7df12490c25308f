"""What is read of archives to be written elsewhere: a part at a time, in another dtype if that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from shardwise.archive import nest
from shardwise.archive.blocks import Blocks
from shardwise.archive.dtypes import DTYPES
from shardwise.archive.memory import buffer_of
from shardwise.archive.nest import Kind, Node, name_of
from shardwise.cli.console import Console
from shardwise.cli.contents import Contents, Held, UsageError
from shardwise.errors import CheckpointError
from shardwise.viz.words import numbered

ROOM = 3  # so many copies of what is read at a time may be in memory: as it is read, as it is converted, blocks of it
SHORT = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "half": "float16"}


@dataclass(frozen=True, eq=False)
class Outgoing:
    """A tensor on its way: where it comes from, and what it is to be."""

    name: str
    held: Held
    dtype: torch.dtype

    @property
    def size(self) -> torch.Size:
        """Its size."""
        return self.held.stored.size

    @property
    def nbytes(self) -> int:
        """Its bytes, as they are written."""
        return self.size.numel() * self.dtype.itemsize

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """A box of it."""
        read = self.held.archive.read_box(self.held.stored, offsets, sizes)
        return read.to(self.dtype).contiguous()


@dataclass(frozen=True, eq=False)
class Rewriting:
    """All that is to be written: each tensor once, and the state that they are in, with its tensors as `Held`."""

    tensors: list[Outgoing]
    tree: Node
    values: list[str]  # the names of entries that are no tensors
    max_memory: int
    told: Callable[[int], object] = lambda _: None

    @staticmethod
    def of(contents: Contents, dtype: str | None, max_memory: int) -> Rewriting:
        """The contents, in which floating-point tensors become of this dtype."""
        wanted = None if dtype is None else floating_dtype(dtype)
        tree = nest.parse(contents.state(), _no_object, tensors=(Held,))
        found: dict[int, Outgoing] = {}
        for path, node in tree.walk():
            if node.kind is Kind.TENSOR and id(node.own.stored) not in found:
                own = node.own.stored.dtype
                kind = wanted if wanted is not None and own.is_floating_point else own
                found[id(node.own.stored)] = Outgoing(name_of(path), node.own, kind)
        return Rewriting(list(found.values()), tree, list(contents.values_by_name), max_memory)

    def telling(self, told: Callable[[int], object]) -> Rewriting:
        """The same, which tells of bytes as they are written."""
        return replace(self, told=told)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, as they are written."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tied(self) -> list[str]:
        """The names of tensors that have another one, too, under which they are written."""
        first = {tensor.name for tensor in self.tensors}
        names = [name_of(path) for path, node in self.tree.walk() if node.kind is Kind.TENSOR]
        return [name for name in names if name not in first]

    def tell_left_out(self, console: Console) -> dict[str, list[str]]:
        """Say what a file that holds tensors only does not have; gives it for JSON."""
        if self.values and not console.as_json:
            console.note(f"{numbered(len(self.values), 'value')} left out, for safetensors holds tensors only")
        if self.tied and not console.as_json:
            names = numbered(len(self.tied), "further name")
            console.note(f"{names} of tied tensors left out, for safetensors holds each tensor once")
        return {"values_left_out": self.values, "tied_left_out": self.tied}

    def name(self, node: Node) -> str:
        """The name of the tensor that a node is: of tied ones, the first."""
        return self.tensor(node).name

    def tensor(self, node: Node) -> Outgoing:
        """The tensor that a node is."""
        return self._outgoing[id(node.own.stored)]

    @cached_property
    def _outgoing(self) -> dict[int, Outgoing]:
        return {id(tensor.held.stored): tensor for tensor in self.tensors}

    def dotted(self) -> dict[str, str]:
        """The names of the tensors with dots between their parts, as others write them."""
        names: dict[str, str] = {}
        for tensor in self.tensors:
            name = tensor.name.replace("/", ".")
            if name in names.values():
                raise UsageError(f"two tensors would be called '{name}': --rename '{tensor.name}=…'")
            names[tensor.name] = name
        return names

    def stretches(
        self, tensor: Outgoing, offsets: Sequence[int], sizes: Sequence[int]
    ) -> Iterator[tuple[memoryview, list[int]]]:
        """The bytes of a box in order, in stretches of whole blocks, with the lengths of the blocks."""
        itemsize = tensor.dtype.itemsize
        most = self.max_memory // (ROOM * max(itemsize, tensor.held.stored.dtype.itemsize))
        for shift, extent in Blocks.of(sizes, itemsize).parts(max(most, 1)):
            part = tensor.read([begin + step for begin, step in zip(offsets, shift, strict=True)], extent)
            yield buffer_of(part), Blocks.of(extent, itemsize).nbytes(itemsize)
            self.told(part.nbytes)

    def buffers(self, tensor: Outgoing) -> Iterator[memoryview]:
        """All bytes of a tensor in order."""
        if tensor.nbytes:
            for memory, _ in self.stretches(tensor, [0] * len(tensor.size), tensor.size):
                yield memory


def floating_dtype(name: str) -> torch.dtype:
    """The dtype that a user names."""
    found = DTYPES.get(SHORT.get(name, name))
    if found is None or not found.is_floating_point:
        known = [name for name, dtype in DTYPES.items() if dtype.is_floating_point]
        raise UsageError(f"--dtype {name} is no floating-point dtype: {', '.join(known)}")
    return found


def _no_object(value: Any, path: nest.Path) -> Any:
    raise CheckpointError(f"'{name_of(path)}' is a {type(value).__name__}, which no checkpoint holds")
