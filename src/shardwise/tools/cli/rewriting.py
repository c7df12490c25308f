"""`Rewriting`: the tensors and the state that a command writes, read one part at a time, in another dtype if asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from shardwise.checkpoint.archive import state_tree
from shardwise.checkpoint.archive.blocks import Blocks
from shardwise.checkpoint.archive.memory import tensor_buffer
from shardwise.checkpoint.archive.state_tree import Node, NodeKind, entry_name
from shardwise.checkpoint.archive.stored import DTYPES
from shardwise.layout.pictures.words import bytes_text, numbered
from shardwise.tools.cli.console import Console
from shardwise.tools.cli.contents import Contents, HeldTensor, UsageError, refuse_objects, tensors_text

COPIES = 3  # of each part that is read, in memory at once: as read, converted, and in blocks
DTYPE_ALIASES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "half": "float16"}


@dataclass(frozen=True, eq=False)
class OutgoingTensor:
    """A tensor to write: its source, its new name and dtype."""

    name: str
    held: HeldTensor
    dtype: torch.dtype

    @property
    def size(self) -> torch.Size:
        """The size of the tensor."""
        return self.held.stored.size

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor as written."""
        return self.size.numel() * self.dtype.itemsize

    def read(self, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
        """A box of the tensor."""
        read = self.held.archive.read_box(self.held.stored, offsets, sizes)
        return read.to(self.dtype).contiguous()


@dataclass(frozen=True, eq=False)
class Rewriting:
    """Everything that a command writes: each tensor once, and the state, whose tensors are `HeldTensor`."""

    tensors: list[OutgoingTensor]
    tree: Node
    values: list[str]  # the names of entries that are no tensors
    max_memory: int
    on_read: Callable[[int], object] = lambda _: None

    @staticmethod
    def of(contents: Contents, dtype: str | None, max_memory: int) -> Rewriting:
        """The contents, with floating-point tensors converted to ``dtype``."""
        wanted = None if dtype is None else floating_dtype(dtype)
        tree = state_tree.parse_state(contents.state(), refuse_objects, tensors=(HeldTensor,))
        found: dict[int, OutgoingTensor] = {}
        for path, node in tree.walk():
            if node.kind is NodeKind.TENSOR and id(node.value.stored) not in found:
                own = node.value.stored.dtype
                kind = wanted if wanted is not None and own.is_floating_point else own
                found[id(node.value.stored)] = OutgoingTensor(entry_name(path), node.value, kind)
        return Rewriting(list(found.values()), tree, list(contents.values_by_name), max_memory)

    def with_progress(self, on_read: Callable[[int], object]) -> Rewriting:
        """The same, with a callback for the bytes that are read."""
        return replace(self, on_read=on_read)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors as written."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def tied(self) -> list[str]:
        """The further names of tied tensors, which are written under their first name."""
        first = {tensor.name for tensor in self.tensors}
        names = [entry_name(path) for path, node in self.tree.walk() if node.kind is NodeKind.TENSOR]
        return [name for name in names if name not in first]

    def count(self, format_: str) -> tuple[int, int, int]:
        """What is written in a format: tensors, names and bytes. Safetensors drops further names, DCP has copies."""
        tensors, more, nbytes = len(self.tensors), len(self.tied), self.nbytes
        if format_ == "safetensors":
            return tensors, tensors, nbytes
        if format_ == "dcp":
            nodes = [node for _, node in self.tree.walk() if node.kind is NodeKind.TENSOR]
            return len(nodes), len(nodes), sum(self.tensor(node).nbytes for node in nodes)
        return tensors, tensors + more, nbytes

    def summary(self, format_: str) -> str:
        """The same in words."""
        tensors, names, nbytes = self.count(format_)
        return f"{tensors_text(tensors, names)}, {bytes_text(nbytes)}"

    def note_left_out(self, console: Console) -> dict[str, list[str]]:
        """Print what a file of tensors only leaves out; gives it for JSON."""
        if self.values and not console.as_json:
            console.note(f"{numbered(len(self.values), 'value')} left out, for safetensors holds tensors only")
        if self.tied and not console.as_json:
            names = numbered(len(self.tied), "further name")
            console.note(f"{names} of tied tensors left out, for safetensors holds each tensor once")
        return {"values_left_out": self.values, "tied_left_out": self.tied}

    def name(self, node: Node) -> str:
        """The name of a node's tensor; of tied ones, the first."""
        return self.tensor(node).name

    def tensor(self, node: Node) -> OutgoingTensor:
        """The tensor of a node."""
        return self._outgoing[id(node.value.stored)]

    @cached_property
    def _outgoing(self) -> dict[int, OutgoingTensor]:
        return {id(tensor.held.stored): tensor for tensor in self.tensors}

    def dotted(self) -> dict[str, str]:
        """The names of the tensors with dots instead of slashes."""
        names: dict[str, str] = {}
        for tensor in self.tensors:
            name = tensor.name.replace("/", ".")
            if name in names.values():
                raise UsageError(f"two tensors would be called '{name}': --rename '{tensor.name}=…'")
            names[tensor.name] = name
        return names

    def block_buffers(
        self, tensor: OutgoingTensor, offsets: Sequence[int], sizes: Sequence[int]
    ) -> Iterator[tuple[memoryview, list[int]]]:
        """The bytes of a box in order, in buffers of whole blocks, with the lengths of the blocks."""
        itemsize = tensor.dtype.itemsize
        most = self.max_memory // (COPIES * max(itemsize, tensor.held.stored.dtype.itemsize))
        for shift, extent in Blocks.of(sizes, itemsize).parts(max(most, 1)):
            part = tensor.read([begin + step for begin, step in zip(offsets, shift, strict=True)], extent)
            yield tensor_buffer(part), Blocks.of(extent, itemsize).nbytes(itemsize)
            self.on_read(part.nbytes)

    def buffers(self, tensor: OutgoingTensor) -> Iterator[memoryview]:
        """All bytes of a tensor in order."""
        if tensor.nbytes:
            for memory, _ in self.block_buffers(tensor, [0] * len(tensor.size), tensor.size):
                yield memory


def floating_dtype(name: str) -> torch.dtype:
    """The floating-point dtype of this name."""
    found = DTYPES.get(DTYPE_ALIASES.get(name, name))
    if found is None or not found.is_floating_point:
        known = [name for name, dtype in DTYPES.items() if dtype.is_floating_point]
        raise UsageError(f"--dtype {name} is no floating-point dtype: {', '.join(known)}")
    return found
