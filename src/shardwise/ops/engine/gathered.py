"""The last resort: computing an op on whole operands, gathered on every rank, if they are within the gather budget."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise import settings
from shardwise.autograd.transfers import Way, moved_tensors
from shardwise.comm.agreement import in_op, in_step_sharing
from shardwise.comm.group import Fields, is_member, without_data
from shardwise.comm.peers import is_known
from shardwise.comm.transfer import make_plan
from shardwise.comm.transfer.in_graph import refuse_in_graph
from shardwise.comm.value_digest import digest
from shardwise.errors import ProcessGroupError, UnsupportedOpError
from shardwise.layout import Layout
from shardwise.ops.engine.call import Call, literals_text
from shardwise.ops.engine.compute import assemble, group_places, result_frame
from shardwise.ops.engine.plain_operand import shared_plain
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import op_name, unsupported
from shardwise.tensor.movement import copy_into, require_movable
from shardwise.tensor.random import (
    STATES_COMPARED,
    default_generator,
    draws_per_rank,
    require_equal_state,
    state_digest,
)
from shardwise.torch_private import OpOverload, pytree


def compute_gathered(
    op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], why: str, written: Iterable[int] = ()
) -> Any:
    """The op on whole operands. Results are replicated; ``written`` are the numbers of tensors that the op writes into.

    Every rank of the group calls it, and computes the same: the generators of ranks that are seeded alike stay alike.
    """
    leaves, tree = pytree.tree_flatten((tuple(args), kwargs))
    at = [k for k, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    originals = [leaves[k] for k in at]
    sharded = [one for one in originals if isinstance(one, ShardedTensorBase)]
    group = sharded[0]._frame.process_group
    require_budget(op, args, kwargs, why, sharded)
    if group is None or not is_member(group) or any(one._frame.process_group is not group for one in sharded):
        raise ProcessGroupError(
            "All distributed tensors should use the same ProcessGroup if used together in an op, "
            f"here '{op_name(op)}', and this rank must be in it"
        )
    seed = _agreed_seed(op, originals, literals_text(leaves), group)
    places = group_places(sharded[0]._layout, group)
    anchors = []
    records = torch.is_grad_enabled() and any(one.requires_grad for one in originals)
    into_plain = any(not isinstance(originals[number], ShardedTensorBase) for number in written)
    for k, one in zip(at, originals, strict=True):
        if isinstance(one, ShardedTensorBase) and into_plain:  # every rank has the whole gradient
            leaves[k] = one.full_tensor()  # type: ignore[attr-defined] # on a group
        elif isinstance(one, ShardedTensorBase):
            plan = make_plan(one._layout, Layout.whole(one.shape, places))
            (leaves[k], *_), anchor = moved_tensors(one, plan, Way(group))
            anchors += [] if anchor is None else [anchor]
        elif not into_plain:
            leaves[k] = shared_plain(one, group)
    wholes = [leaves[k] for k in at]
    for number in written:
        if isinstance(originals[number], ShardedTensorBase) and wholes[number].requires_grad:
            wholes[number] = leaves[at[number]] = wholes[number].clone()
        elif not isinstance(originals[number], ShardedTensorBase):
            wholes[number] = leaves[at[number]] = originals[number]
    full_args, full_kwargs = pytree.tree_unflatten(leaves, tree)
    everywhere = Layout.whole(sharded[0].shape, places)
    compute = functools.partial(op, *full_args, **full_kwargs)
    if _may_draw(op):
        refuse_in_graph(f"'{op_name(op)}' on whole operands, which may draw random numbers,", STATES_COMPARED)
        result = _drawing_alike(seed, sharded[0].device, group, everywhere, compute)
    else:
        result = compute()
    for number in written:
        target = originals[number]
        if isinstance(target, ShardedTensorBase):
            _write_back(target, wholes[number], places, group)

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.layout != torch.strided:  # every rank has the result; its gradient would count once for each rank
            if leaf.requires_grad:
                raise unsupported(op, args, kwargs, "a sparse result has no gradient here: detach the operands")
            return leaf
        for number in written:
            if leaf is wholes[number]:
                return originals[number]
        frame = result_frame(Layout.whole(leaf.shape, places), leaf.dtype, group)
        wrapped = assemble(type(sharded[0]), frame, [leaf], anchors, records)
        wrapped._moved = True
        return wrapped

    return pytree.tree_map(wrap, result)


def _write_back(target: ShardedTensorBase, whole: torch.Tensor, places: Any, group: ProcessGroup) -> None:
    if whole.shape != target.shape:
        raise unsupported(torch.Tensor.resize_, (target,), {}, "a sharded tensor cannot be given another size in place")
    frame = result_frame(Layout.whole(whole.shape, places), whole.dtype, group)
    copy_into(target, assemble(type(target), frame, [whole], [], False))


def try_gathered(call: Call) -> Any:
    """The call on whole operands; NotImplemented if it is refused, as beyond the gather budget."""
    try:
        return compute_gathered(call.op, (), call.arguments, needs_whole(call))
    except UnsupportedOpError as error:
        if is_known(error):  # of another rank
            raise
        return NotImplemented


def needs_whole(call: Call) -> str:
    """Why an op cannot be computed on shards: the operands that it needs whole."""
    named = []
    for name, value in call.arguments.items():
        each = value if isinstance(value, list | tuple) else [value]
        sizes = [
            str(tuple(one.shape)) for one in each if isinstance(one, ShardedTensorBase) and not is_fully_replicated(one)
        ]
        if sizes:
            named.append(f"{name} {', '.join(sizes)}")
    return f"{call.op} needs {' and '.join(named) or 'its operands'} whole"


def require_budget(
    op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], why: str, sharded: Sequence[ShardedTensorBase]
) -> None:
    """Raise if gathering these operands of a call on every rank would take more than the gather budget."""
    budget, whole = settings.current().gather_budget, _gathered_bytes(sharded)
    if whole > budget:
        error = unsupported(
            op,
            args,
            kwargs,
            f"{why}, which would gather {whole:,} bytes on every rank, more than the gather budget of {budget:,}",
            f"Allow it with shardwise.gather_budget({whole}) or register a rule with @shardwise.register_op",
        )
        error.reason = why
        raise error


def may_gather(call: Call) -> bool:
    """Whether the sharded operands of a call are within the gather budget, or have no data."""
    sharded = call.sharded()
    return _gathered_bytes(sharded) <= settings.current().gather_budget or any(one.is_meta for one in sharded)


def _gathered_bytes(sharded: Sequence[ShardedTensorBase]) -> int:
    return sum(one.shape.numel() * one.dtype.itemsize for one in sharded if not is_fully_replicated(one))


def is_fully_replicated(tensor: ShardedTensorBase) -> bool:
    """Whether every rank holds all of the tensor already."""
    layout, group = tensor._layout, tensor._frame.process_group
    ranks = len(layout.places.different_ranks)
    return layout.is_whole_everywhere and group is not None and ranks == dist.get_world_size(group)


def _drawing_alike(
    seed: int | None, device: torch.device, group: ProcessGroup, layout: Layout, work: Callable[[], Any]
) -> Any:
    """Do the same work as all ranks, which must draw the same numbers: from this seed, else from their generators."""
    generator = default_generator(device)
    if generator is None:
        return work()
    if seed is None:
        before = state_digest(generator)
        result = work()
        if before != state_digest(generator):
            require_equal_state(layout, before, group)
        return result
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        result = work()
        drew = bool(devices) or not torch.equal(state, torch.get_rng_state())
    if drew:
        torch.rand(())
    return result


def _agreed_seed(
    op: Callable[..., Any], operands: list[torch.Tensor], arguments: str, group: ProcessGroup
) -> int | None:
    """Compare with all ranks what is about to be computed, small plain operands too.

    Where each rank draws its own numbers, and the op may draw some, all ranks get a seed of the first rank.
    """

    def work() -> tuple[None, Fields]:
        fields: dict[str, object] = {"op": op_name(op), "arguments": arguments}
        fields["gather_budget"] = settings.current().gather_budget
        for k, one in enumerate(operands):
            if isinstance(one, ShardedTensorBase):
                require_movable(one)
                about = one._layout.outline
            else:
                about = f"{tuple(one.shape)} {digest(one)}"
            records = torch.is_grad_enabled() and one.requires_grad
            fields[f"operand {k}"] = f"{about} {one.dtype} requires_grad={records}"
        return None, fields

    def with_seed() -> tuple[None, Fields, int]:
        draws = dist.get_rank(group) == 0 and not without_data()
        state = torch.get_rng_state().numpy().tobytes() if draws else b""
        return *work(), int.from_bytes(hashlib.blake2b(state, digest_size=7).digest(), "little")

    if draws_per_rank(group) and _may_draw(op):
        return int(in_step_sharing(group, with_seed)[1][0])
    in_op(group, work)
    return None


def _may_draw(op: Callable[..., Any]) -> bool:
    """Whether an op may draw random numbers, by the tags of aten ops. The same on every rank."""
    if not isinstance(op, OpOverload) or op.namespace != "aten":
        return True
    return torch.Tag.nondeterministic_seeded in op.tags
