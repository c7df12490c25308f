"""`Variants`: the graphs of one kind of call on this rank, which differ in what no other rank need know.

Ranks compile the first graph of a kind together. Then one of them may get a local tensor of other strides, or arguments
that share memory, of which the call writes into one. That rank compiles another graph alone, which sends the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from shardwise.comm.agreement import epoch_mark, notify_of_leaving
from shardwise.compilation.full_graph.inputs import CallInputs
from shardwise.errors import UnsupportedOpError

MOST_VARIANTS = 8  # of one kind of call; from then on, arguments are copied into contiguous memory


class Compiled(Protocol):
    """A graph for the calls of one variant."""

    written: tuple[int, ...]  # the numbers of the local tensors that it writes into

    def __call__(self, call: CallInputs) -> Any:
        """What the call gives."""


Compile = Callable[[CallInputs], tuple[Compiled, dict[str, Any]]]


class Variants:
    """The graphs of one kind of call."""

    def __init__(self, call: CallInputs, first: Compiled, said: dict[str, Any]) -> None:
        """With the graph that the ranks have compiled together, and what they have said of it."""
        self._said, self._written = said, first.written
        self._graphs: dict[Any, Compiled] = {self._key(call): first}

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, call: CallInputs, compile_alone: Compile) -> Any:
        """What a call of this kind gives, by its graph, compiled now if there is none."""
        graph = self._graphs.get(self._key(call))
        if graph is None:
            graph, call = self._made(call, compile_alone)
        return graph(call)

    def _key(self, call: CallInputs) -> Any:
        return (call.strides(), shared_memory(call.tensors(), self._written)) if self._written else call.strides()

    def _made(self, call: CallInputs, compile_alone: Compile) -> tuple[Compiled, CallInputs]:
        """A graph for a call, and the call that it takes."""
        marks = [(group, epoch_mark(group)) for group in call.groups]
        try:
            if len(self._graphs) >= MOST_VARIANTS:
                call = call.contiguous(self._written)
            key = self._key(call)
            if key not in self._graphs:
                made, said = compile_alone(call)
                if said != self._said:
                    raise UnsupportedOpError(
                        "the strides of an argument on this rank, or memory that arguments share, change which data "
                        f"the graph of a call sends: {said['transfers']}, not {self._said['transfers']}. Give every "
                        "rank contiguous arguments"
                    )
                self._graphs[key] = made
            return self._graphs[key], call
        except Exception as error:
            for group, mark in marks:
                notify_of_leaving(group, error, mark)  # the others run their graphs
            raise


@contextmanager
def refusing_shared_memory(call: CallInputs) -> Iterator[None]:
    """Within this context, a compiler that cannot have tensors of a call share memory raises an error that says so."""
    try:
        yield
    except AssertionError as error:
        tensors = call.tensors()
        shared = shared_memory(tensors, range(len(tensors)))
        if not shared or not torch.is_grad_enabled():
            raise
        sizes = ", ".join(str(tuple(tensors[k].shape)) for k, _ in shared[0][1:])
        raise UnsupportedOpError(
            f"local tensors of a call, of the sizes {sizes}, share memory, and the call writes into one of them while "
            "gradients are recorded, which one graph cannot do: give clones, call it under torch.no_grad(), or compile "
            f"without fullgraph ({error})"
        ) from error


def shared_memory(tensors: Sequence[torch.Tensor], written: Sequence[int]) -> tuple[Any, ...]:
    """Which tensors share memory with one that is written into, and where each lies in it; nothing if none does."""
    first = {_begin_of_storage(tensors[k]): k for k in reversed(written) if tensors[k].numel()}
    if not first:
        return ()
    found: dict[int, list[int]] = {}
    for k, tensor in enumerate(tensors):
        storage = _begin_of_storage(tensor)
        if storage in first and tensor.numel():
            found.setdefault(first[storage], []).append(k)
    return tuple([_places(tensors, same) for same in found.values() if _overlap(tensors, same, written)])


def _begin_of_storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _overlap(tensors: Sequence[torch.Tensor], same: list[int], written: Sequence[int]) -> bool:
    """Whether one that is written into may overlap with another one in the same storage."""
    spans = {k: _span(tensors[k]) for k in same}
    return len(same) > 1 and any(
        one in written and one != other and spans[one][0] < spans[other][1] and spans[other][0] < spans[one][1]
        for one in same
        for other in same
    )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes between the first and the last element."""
    begin = int(tensor.storage_offset())
    end = begin + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return begin * tensor.element_size(), end * tensor.element_size()


def _places(tensors: Sequence[torch.Tensor], same: list[int]) -> tuple[Any, ...]:
    return tensors[same[0]].untyped_storage().nbytes(), *[(k, tensors[k].storage_offset()) for k in same]
