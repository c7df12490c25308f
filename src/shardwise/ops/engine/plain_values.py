"""The values of plain operands, which must be the same on every rank: compared in the first calls of each function.

A rank that passes its own batch as a plain tensor, as under DDP, would get a wrong result without a word. So the first
calls with plain operands are added to the history of the group together with a few bytes of their values. Nothing is
sent for it: ranks whose histories differ find out where they meet, or wait, and the error names the op, the argument
and the ranks.

All ranks decide alike which calls are compared: by the function and by sizes and dtypes of its plain arguments alone,
not by the programs that they have recorded.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch.nn import functional
from torch.overrides import get_testing_overrides

from shardwise import settings
from shardwise.comm.agreement import record_call, settle
from shardwise.comm.group import CallFingerprint, group_state, is_capturing, talks, without_data
from shardwise.comm.peers import PLAIN_VALUE
from shardwise.comm.tracing.origin import name_of
from shardwise.comm.transfer.views import resolved
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import Distributed
from shardwise.torch_private import current_backward, pytree

if TYPE_CHECKING:
    from shardwise.ops.engine.program import Program

FIRST_CALLS = 3  # of a function with plain tensors of some sizes, which are compared
MOST_CALLS = 64  # of one function, whatever its arguments are
SAMPLE = 2**14  # elements of an operand that are read
DIGITS = 32  # steps to which a mantissa is rounded: far fewer than float32 tells apart
NOISE = 1e-5  # of an element: smaller ones may be what rounding has left
ADVICE = "seed before you draw it; or, if each rank has its own part, say so with shardwise.from_local(x)"
OWN_BATCH_ARGUMENTS = {"input", "indices", "offsets", "per_sample_weights"}  # each rank's own, under own_batches, in:
OWN_BATCH_OPS = {functional.linear, functional.embedding, functional.embedding_bag}
OWN_BATCH_OPS |= {torch.embedding, torch.embedding_bag}

Path = Sequence[Any]  # in ``(args, kwargs)``


def note_plain_values(
    op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], program: Program | None = None
) -> None:
    """Add the values of plain operands to the history, in the first calls of an epoch; not within a backward.

    A program that runs need not come here any more in this epoch, once there have been enough calls like it.
    """
    checks = settings.current()
    if not (checks.validate and checks.compares_first) or current_backward() != -1 or is_capturing() or without_data():
        return
    leaves = pytree.tree_leaves_with_path((tuple(args), kwargs))
    sharded = next((leaf for _, leaf in leaves if isinstance(leaf, ShardedTensorBase)), None)
    group, name = None if sharded is None else sharded._process_group, name_of(op)
    if group is None or not group_state(group).is_registered:
        return
    if not talks(group):
        if program is not None:
            program.compared_in = group_state(group).history.epoch
        return
    # Parameters were made alike by `shard_module`; other subclasses, such as DTensor, are no plain tensors.
    plain = [(path, leaf) for path, leaf in plain_operands(op, leaves) if leaf.ndim and type(leaf) is torch.Tensor]
    history = settle(group) if plain else group_state(group).history  # of the epoch in which the call is added
    counts, alike = history.plain_calls, (name, *((leaf.shape, leaf.dtype) for _, leaf in plain))
    if not plain or counts.get(alike, 0) >= FIRST_CALLS or counts.get(name, 0) >= MOST_CALLS:
        if program is not None:
            program.compared_in = history.epoch
        return
    counts[alike], counts[name] = counts.get(alike, 0) + 1, counts.get(name, 0) + 1
    fields = {f"{argument(op, path)} {PLAIN_VALUE}: {ADVICE}": values_in_words(leaf) for path, leaf in plain}
    record_call(group, CallFingerprint({"op": name, **fields}))


def values_in_words(tensor: torch.Tensor) -> str:
    """What ranks compare of a plain tensor."""
    return f"{tuple(tensor.shape)} {tensor.dtype} {fingerprint(tensor)}"


def fingerprint(tensor: torch.Tensor) -> str:
    """A few digits of some elements of a plain tensor, which seldom differ for values that differ by rounding.

    Ranks that compute a plain tensor by themselves, on devices that are not alike, may have other last bits. So of
    floating-point numbers a weighted sum is compared, in few digits; of whole numbers a hash; of numbers with few
    digits, such as bfloat16, nothing.
    """
    few_digits = tensor.is_floating_point() and torch.finfo(tensor.dtype).eps > 1e-4
    if tensor.layout != torch.strided or not tensor.numel() or few_digits:
        return ""
    flat = resolved(tensor.detach()).reshape(-1)
    some = flat[:: -(-len(flat) // SAMPLE)].cpu().contiguous()
    if not (some.is_floating_point() or some.is_complex()):
        return xxhash.xxh3_64_hexdigest(some.view(torch.uint8).numpy().data)
    values = torch.view_as_real(some).reshape(-1) if some.is_complex() else some
    values = values.to(torch.float64)
    finite = values[values.isfinite()].asinh()  # so that the large numbers of a mask do not hide all others
    total = float(finite @ _weights(len(finite))) if len(finite) else 0.0
    if abs(total) < NOISE * math.sqrt(len(values)):
        total = 0.0
    mantissa, exponent = math.frexp(total)
    return f"{len(values) - len(finite)} {round(mantissa * DIGITS)} {exponent}"


@lru_cache(maxsize=64)
def _weights(count: int) -> torch.Tensor:
    """Weights of a sum, drawn alike on every rank, whatever is drawn elsewhere."""
    made = torch.Generator().manual_seed(7)
    return torch.randn(count, generator=made, dtype=torch.float64, device="cpu")


def plain_operands(op: Callable[..., Any], leaves: Sequence[tuple[Path, Any]]) -> Iterator[tuple[Path, torch.Tensor]]:
    """The plain tensors among the arguments of a call that must be the same on every rank."""
    own = settings.current().own_batches and op in OWN_BATCH_OPS
    for path, leaf in leaves:
        is_own = own and _name(op, path) in OWN_BATCH_ARGUMENTS
        if _is_plain(leaf) and not _is_destination(op, path) and not is_own:
            yield path, leaf


def _is_plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, Distributed) and not value.is_meta


def _is_destination(op: Callable[..., Any], path: Path) -> bool:
    """Whether an argument is written into, or only its size and dtype are read."""
    first, name = path[1], str(getattr(op, "__name__", ""))
    if isinstance(first, pytree.MappingKey):
        return bool(first.key == "out")
    is_first = isinstance(first, pytree.SequenceKey) and first.idx == 0
    writes = name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    return (is_first and writes) or name.endswith(("_as", "_like")) or name == "result_type"


def argument(op: Callable[..., Any], path: Path) -> str:
    """The argument and the position within it, for an error."""
    name = _name(op, path)
    return f"argument {name if isinstance(name, int) else repr(name)}{pytree.keystr(tuple(path[2:]))}"


def _name(op: Callable[..., Any], path: Path) -> str | int:
    """The name that torch declares for an argument at a path in ``(args, kwargs)``; else its number."""
    first: Any = path[1]
    if isinstance(first, pytree.MappingKey):
        return str(first.key)
    names, position = _names(op), int(first.idx)
    return names[position] if position < len(names) else position


@lru_cache(maxsize=256)
def _names(op: Callable[..., Any]) -> tuple[str, ...]:
    """The names of an op's arguments; for functions of C, those of the stand-ins in torch's own tests."""
    try:
        signature = inspect.signature(get_testing_overrides().get(op, op))
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(name for name, parameter in signature.parameters.items() if parameter.kind in kinds)
