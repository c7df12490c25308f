"""The op of a graph by which data goes between ranks: `shardwise::transfer`, or its halves `begin` and `finish`.

Its last argument is a key. Under the key this process keeps a `Transfer` (`graph_transfer`): what is to be done with
the tensors, and the sizes of the results.

All transfers of a graph are chained by a token, a tensor without meaning that each takes and gives: ranks have
different graphs, and the chain makes each of them send in the order in which the model was traced.

A transfer may be in two halves (`early_transfers`). The first one gives memory for the results, which the second one
fills. The second one also takes the operands, so that a compiler uses their memory for nothing else before.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import library as custom_ops
from torch.distributed import ProcessGroup

from shardwise.comm.group import GroupState, group_state
from shardwise.comm.transfer import Moving, TransferPlan
from shardwise.comm.transfer.local_copies import Done
from shardwise.comm.transfer.views import as_data
from shardwise.compilation.full_graph.graph_transfer import Move, RandomDraw, ReplicaSums, Transfer
from shardwise.errors import UnsupportedOpError
from shardwise.layout import Layout
from shardwise.ops.engine.steps import DrawRandom

# The op --------------------------------------------------------------------------------------------------------------

_transfers: dict[str, tuple[Transfer, GroupState]] = {}  # by key, as long as their groups live
_keys: weakref.WeakKeyDictionary[GroupState, set[str]] = weakref.WeakKeyDictionary()  # of the transfers of each group
_namespace: Any = custom_ops.Library("shardwise", "FRAGMENT")  # type: ignore[no-untyped-call] # torch's
_namespace.define("transfer(Tensor token, Tensor[] tensors, str key) -> Tensor[]")
_namespace.define("begin(Tensor token, Tensor[] tensors, str key) -> Tensor[]")
_namespace.define("finish(Tensor token, Tensor begun, Tensor(a!)[] outs, Tensor[] tensors) -> Tensor")
_namespace.define("own_memory(Tensor tensor) -> Tensor")  # a clone that compilers do not remove
OF_SIZE = "(Tensor token, Tensor[] tensors, str form, SymInt[] extents, SymInt keys, int number) -> Tensor[]"
_namespace.define(f"transfer_of_size{OF_SIZE}")
_namespace.define(f"begin_of_size{OF_SIZE}")


def _keep(transfer: Transfer) -> str:
    """The key under which the op finds a transfer from now on, until its group ends."""
    key, state = transfer.key, group_state(transfer.group)
    if key not in _transfers or _transfers[key][1] is not state:  # another group had the same name and ranks
        _transfers[key] = transfer, state
        _keys.setdefault(state, set()).add(key)
        state.at_end.add(_forget)
    return key


def _forget(state: GroupState) -> None:
    for key in _keys.pop(state, set()):
        if key in _transfers and _transfers[key][1] is state:
            del _transfers[key]
    for keys in [keys for keys in _lists if not all(key in _transfers for key in keys)]:
        del _keys_of_lists[_lists.pop(keys)]


def found_transfer(key: str) -> Transfer:
    """The transfer that is kept under a key."""
    if key not in _transfers:
        raise UnsupportedOpError(
            f"this process does not know the transfer '{key}' of a compiled graph: a graph runs only in the process "
            "that has traced it, as long as the process group is not destroyed"
        )
    return _transfers[key][0]


def _new_token(token: torch.Tensor) -> torch.Tensor:
    return token.new_empty((), dtype=torch.float32)


def _run(token: torch.Tensor, tensors: list[torch.Tensor], key: str) -> list[torch.Tensor]:
    transfer = found_transfer(key)
    if transfer.gives_new_memory:
        return [_new_token(token), *transfer.run([as_data(tensor).contiguous() for tensor in tensors])]
    outs = transfer.run([tensor.detach().contiguous() for tensor in tensors])
    # A compiler takes each result for memory of its own, from the beginning of its storage.
    taken = {_memory(tensor) for tensor in tensors}
    return [_new_token(token), *[_own_memory(out, taken) for out in outs]]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _own_memory(out: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """The result, in memory that is not taken by operands and other results."""
    if not out.is_contiguous() or out.storage_offset() or (out.numel() and _memory(out) in taken):
        out = out.clone(memory_format=torch.contiguous_format)
    taken.add(_memory(out))
    return out


def _run_without_data(token: torch.Tensor, tensors: list[torch.Tensor], key: str) -> list[torch.Tensor]:
    sizes = found_transfer(key).sizes()
    return [_new_token(token), *[torch.empty(size, dtype=dtype, device=device) for size, dtype, device in sizes]]


_under_way: dict[int, Moving] = {}  # by the address of the token that the first half gave, while the token lives


def _begin(token: torch.Tensor, tensors: list[torch.Tensor], key: str) -> list[torch.Tensor]:
    transfer = found_transfer(key)
    begun = transfer.begin([as_data(one).contiguous() for one in tensors]) if isinstance(transfer, Move) else None
    if begun is None:
        made, *outs = _run(token, tensors, key)
        moving: Moving = Done(outs)
    else:
        made, (outs, moving) = _new_token(token), begun
    address = made.data_ptr()
    _under_way[address] = moving
    weakref.finalize(made, _drop, address, moving).atexit = False  # an error may come before the second half
    return [made, *outs]


def _drop(address: int, moving: Moving) -> None:
    if _under_way.get(address) is moving:
        del _under_way[address]


def _finish(
    token: torch.Tensor, begun: torch.Tensor, outs: list[torch.Tensor], tensors: list[torch.Tensor]
) -> torch.Tensor:
    _under_way.pop(begun.data_ptr()).wait()
    return _new_token(token)


_namespace.impl("transfer", _run, "CompositeExplicitAutograd")
_namespace.impl("begin", _begin, "CompositeExplicitAutograd")
_namespace.impl("finish", _finish, "CompositeExplicitAutograd")
for _name in ("transfer", "begin"):
    custom_ops.register_fake(f"shardwise::{_name}", _run_without_data, lib=_namespace)
custom_ops.register_fake("shardwise::finish", lambda token, *rest: _new_token(token), lib=_namespace)


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


_namespace.impl("own_memory", _clone, "CompositeExplicitAutograd")
custom_ops.register_fake("shardwise::own_memory", _clone, lib=_namespace)


# The same op in graphs for many sizes: which transfer it makes is one of a list, which the graph is given -----------

_lists: dict[tuple[str, ...], int] = {}  # the number of each list of keys
_keys_of_lists: dict[int, tuple[str, ...]] = {}  # by these numbers
_next_list = itertools.count()


def transfer_list(keys: tuple[str, ...]) -> int:
    """The number of a list of transfers, by which graphs in this process find them."""
    if keys not in _lists:
        _lists[keys] = next(_next_list)
        _keys_of_lists[_lists[keys]] = keys
    return _lists[keys]


def _run_of_size(
    token: torch.Tensor, tensors: list[torch.Tensor], form: str, extents: list[int], keys: int, number: int
) -> list[torch.Tensor]:
    return _run(token, tensors, _key_of(keys, number))


def _begin_of_size(
    token: torch.Tensor, tensors: list[torch.Tensor], form: str, extents: list[int], keys: int, number: int
) -> list[torch.Tensor]:
    return _begin(token, tensors, _key_of(keys, number))


def _key_of(keys: int, number: int) -> str:
    return _keys_of_lists[keys][number] if keys in _keys_of_lists else f"{number} of a list that has ended"


def _run_of_size_without_data(
    token: torch.Tensor, tensors: list[torch.Tensor], form: str, extents: list[Any], keys: Any, number: int
) -> list[torch.Tensor]:
    """A result for each part of the form, such as ``2 float32 cpu``: so many of the extents, a dtype and a device."""
    outs, rest = [_new_token(token)], iter(extents)
    for part in filter(None, form.split(";")):
        dims, dtype, device = part.split(" ")
        size = [next(rest) for _ in range(int(dims))]
        outs.append(torch.empty(size, dtype=getattr(torch, dtype), device=device))
    return outs


_namespace.impl("transfer_of_size", _run_of_size, "CompositeExplicitAutograd")
_namespace.impl("begin_of_size", _begin_of_size, "CompositeExplicitAutograd")
for _name in ("transfer_of_size", "begin_of_size"):
    custom_ops.register_fake(f"shardwise::{_name}", _run_of_size_without_data, lib=_namespace)


class GraphTransfers:
    """Adds the transfers of one traced function to its graph, in the order in which they are traced."""

    token: torch.Tensor  # of the last transfer so far

    def __init__(self) -> None:
        self.anchor: torch.Tensor | None = None
        self._behind: torch.Tensor | None = None  # what the next transfer takes in place of the token
        self.keys: list[str] = []  # in order: what all ranks compare

    def begin(self, token: torch.Tensor) -> None:
        """Begin to trace, maybe again: compilers trace a function several times."""
        self.token, self.anchor, self.keys, self._behind = token.detach(), None, [], None

    def begin_backward(self, gradient: torch.Tensor) -> None:
        """The next transfer takes this gradient of a result for its token, and so is a part of the backward.

        A rank that brings nothing to the transfers of the backward would send its part of them in the forward, for
        that is where compilers put what depends on no gradient.
        """
        self._behind = gradient.detach()

    def add(self, transfer: Transfer, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results of a transfer, which becomes an op of the graph."""
        key = _keep(transfer)
        self.keys.append(key)
        outs: list[torch.Tensor]
        with torch.no_grad():
            token, self._behind = self.token if self._behind is None else self._behind, None
            self.token, *outs = torch.ops.shardwise.transfer(token, list(tensors), key)
        return outs

    def move(
        self,
        plan: TransferPlan,
        tensors: Sequence[torch.Tensor],
        group: ProcessGroup,
        *,
        dtype: torch.dtype,
        max_bytes: int | None,
        fill: Any,
    ) -> list[torch.Tensor]:
        """The local tensors of the plan's destination."""
        return self.add(Move(plan, group, dtype, max_bytes, fill), tensors)

    def sum_replicas(
        self, layout: Layout, tensors: Sequence[torch.Tensor], group: ProcessGroup, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """For each local tensor of a layout the sum over all replicas of its box."""
        return self.add(ReplicaSums(layout, group, dtype), tensors)

    def draw(self, step: DrawRandom) -> list[torch.Tensor]:
        """Random numbers for this rank's boxes."""
        if step.generator is not None:
            raise UnsupportedOpError(
                "random numbers from a torch.Generator cannot be a part of one graph: draw from torch's own generator, "
                "which torch.manual_seed sets, or draw before the compiled call"
            )
        return self.add(RandomDraw(step), [])
