"""Looking rows up in a sharded table: `embedding` and `embedding_bag`. What travels are ids and their rows.

Ids are one value. Sharded ones, as `from_local` makes them, are looked up where they lie; of plain ones, which are the
same on every rank, each rank looks up a part. The result is sharded as the ids are. Where every rank has all rows of
the columns that it holds, plain ids need nobody else, and the result is sharded as the columns are.

Where `own_batches` holds, plain ids are this rank's own batch, and so is the result, a plain tensor: the table's
gradient is that of all ranks' losses together. Ids in a `ReplicatedTensor` are then one batch, which every rank has,
and so is the result: its gradient counts once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from shardwise import settings
from shardwise.dispatch import Distributed, Op, registry
from shardwise.ops.embedding.bags import bags_of
from shardwise.ops.embedding.lookup import Found, Options, Wanted, look_up, require_rows, row_of
from shardwise.ops.embedding.portion import flat, outlines, portion_of, wrapped
from shardwise.ops.embedding.unknown import unknown_rows
from shardwise.ops.engine.descent import descend
from shardwise.ops.engine.gathered import is_everywhere, require_budget
from shardwise.ops.engine.program import without_autocast
from shardwise.partial import ReplicatedTensor
from shardwise.sharded_tensor import ShardedTensor
from shardwise.sharded_tensor.gradients import counted_once
from shardwise.tracing import record

Plain = Callable[..., Any]  # torch's own op on plain ids and a plain table


# Ids that are one value ----------------------------------------------------------------------------------------------


def _embedding_of_all(op: Op, ids: Any, weight: ShardedTensor, options: Options) -> Any:
    """A row for each id, where the id lies."""
    ids = _plain_if_everywhere(ids, weight)
    if isinstance(ids, ReplicatedTensor):
        ids = ids.as_subclass(torch.Tensor)
    if not isinstance(ids, Distributed) and _can_stay(weight, options):
        readable = ids.device.type == "cpu" and not ids.is_meta  # elsewhere that would have to be waited for
        if readable and not record.is_forecast():
            require_rows(ids, weight.shape[0])
        rest = (options.padding_idx, options.max_norm, options.norm_type, options.scale_grad_by_freq, options.sparse)
        return descend(functional.embedding, (ids, weight, *rest), {})
    portion = portion_of(ids, weight)
    if weight.is_meta:
        count = sum(one.numel() for one in portion.tensors)
        return wrapped(portion.layout, torch.empty(count, weight.shape[1], dtype=weight.dtype, device="meta"), weight)
    if record.is_forecast():
        return wrapped(portion.layout, unknown_rows(weight, sum(one.numel() for one in portion.tensors)), weight)

    def want() -> Wanted:
        mine = flat(portion.tensors, weight.device)
        return Wanted(mine, _checked_by(functional.embedding, mine, options), outlines(ids=ids), portion.counted())

    batch, rows = look_up(op, weight, options, want, distinct=False)
    return wrapped(portion.layout, batch.spread(rows), weight)


def _bags_of_all(op: Op, given: dict[str, Any], options: Options) -> Any:
    """A row for each bag, on the rank that has its ids."""
    weight, ends = given["weight"], given.get("include_last_offset", False)
    ids, offsets = (_plain_if_everywhere(given.get(name), weight) for name in ("input", "offsets"))
    samples = given.get("per_sample_weights")

    def gather(sharded: Sequence[ShardedTensor]) -> list[torch.Tensor]:
        require_budget(op, (ids, weight), {"offsets": offsets}, "a bag that is cut needs its ids whole", sharded)
        return [one.full_tensor() for one in sharded]

    bags = bags_of(ids, offsets, samples, weight, ends=ends, gather=gather)
    plain: Plain = partial(functional.embedding_bag, mode=given["mode"])
    own = partial(plain, offsets=bags.offsets, per_sample_weights=bags.samples)

    def check(table: torch.Tensor) -> None:
        if bags.whole is not None:  # before it was cut
            all_ids, all_offsets, weights = bags.whole
            whole = partial(plain, offsets=all_offsets, per_sample_weights=weights, include_last_offset=ends)
            _checked_by(whole, all_ids, options)(table)
        _checked_by(own, bags.ids, options)(table)

    about = outlines(ids=ids, offsets=offsets, per_sample_weights=samples)
    want = partial(Wanted, bags.ids, check, about, bags.counted)
    found = look_up(op, weight, options, want, distinct=True)
    return wrapped(bags.layout, _bagged(found, own, weight, options), weight)


def _plain_if_everywhere(value: Any, weight: ShardedTensor) -> Any:
    """Ids or offsets that are replicated on every rank of the table's group are as good as plain ones."""
    if not isinstance(value, ShardedTensor) or value._process_group is not weight._process_group:
        return value
    return value._local_tensors()[0] if is_everywhere(value) else value


def _can_stay(weight: ShardedTensor, options: Options) -> bool:
    """Whether plain ids need nobody else: every rank has all rows of its columns, and no row is looked at whole."""
    layout = weight._layout
    whole = layout.ndim == 2 and not layout.cuts(0)
    return whole and options.max_norm is None and not (options.sparse and layout.has_replicas)


# Ids of each rank's own ----------------------------------------------------------------------------------------------


def _look_up_own(op: Op, ids: torch.Tensor, weight: ShardedTensor, options: Options, plain: Plain, **how: Any) -> Found:
    """The rows of this rank's own batch; of a batch that every rank has, the first rank speaks for all."""
    silent = isinstance(ids, ReplicatedTensor) and dist.get_rank(weight._process_group) > 0

    def want() -> Wanted:
        return Wanted(ids, _checked_by(plain, ids, options), {}, torch.zeros_like(ids) if silent else None)

    batch, rows = look_up(op, weight, options, want, **how)
    return Found(batch, counted_once(rows, False) if silent and rows.requires_grad else rows)


def _embedding_of_own(op: Op, ids: Any, weight: ShardedTensor, options: Options) -> torch.Tensor:
    """A row for each id. That the padding gets no gradient is seen to where its row lies."""
    batch, rows = _look_up_own(op, ids, weight, options, functional.embedding, distinct=False)
    return batch.spread(rows)


def _bags_of_own(op: Op, given: dict[str, Any], options: Options) -> Any:
    names = ("offsets", "mode", "per_sample_weights", "include_last_offset")
    plain = partial(functional.embedding_bag, **{name: given[name] for name in names if name in given})
    found = _look_up_own(op, given["input"], given["weight"], options, plain, distinct=True)
    return _bagged(found, plain, given["weight"], options)


# Both ----------------------------------------------------------------------------------------------------------------


def _checked_by(plain: Plain, ids: torch.Tensor, options: Options) -> Callable[[torch.Tensor], None]:
    """torch's own op on ids of a table of one number, where it finds whatever is wrong with them."""

    def check(table: torch.Tensor) -> None:
        plain(torch.zeros_like(ids), table, scale_grad_by_freq=options.scale_grad_by_freq, sparse=options.sparse)

    return check


def _bagged(found: Found, plain: Plain, weight: ShardedTensor, options: Options) -> Any:
    """What torch's own op makes of a small table of the rows that are needed."""
    padding = found.batch.entry_of(row_of(options.padding_idx, weight.shape[0]))
    return plain(found.batch.entries, found.rows, padding_idx=padding)


# The ops, as torch declares them -------------------------------------------------------------------------------------


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    options = Options(padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    return _by_rule(_embedding_of_own, _embedding_of_all, input)(functional.embedding, input, weight, options)


def _embedding_below(
    weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    """`torch.embedding`, where a negative padding stands for none."""
    options = Options(None if padding_idx < 0 else padding_idx, None, 2.0, scale_grad_by_freq, sparse)
    return _by_rule(_embedding_of_own, _embedding_of_all, indices)(torch.embedding, indices, weight, options)


def _embedding_bag(
    input: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    given = {"input": input, "weight": weight, "offsets": offsets, "per_sample_weights": per_sample_weights}
    given |= {"mode": mode, "include_last_offset": include_last_offset}
    options = Options(padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, mode)
    tensors = (input, offsets, per_sample_weights)
    return _by_rule(_bags_of_own, _bags_of_all, *tensors)(functional.embedding_bag, given, options)


def _embedding_bag_below(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """`torch.embedding_bag`, which also tells which row each maximum comes from."""

    def plain(
        ids: Any, table: Any, scale_grad_by_freq: bool = False, sparse: bool = False, padding_idx: int | None = None
    ) -> Any:
        rest = (per_sample_weights, include_last_offset, padding_idx)
        return torch.embedding_bag(table, ids, offsets, scale_grad_by_freq, mode, sparse, *rest)

    if not _are_own(indices, offsets, per_sample_weights):
        return descend(
            torch.embedding_bag,
            (weight, indices, offsets, scale_grad_by_freq, mode, sparse),
            {
                "per_sample_weights": per_sample_weights,
                "include_last_offset": include_last_offset,
                "padding_idx": padding_idx,
            },
        )
    options = Options(padding_idx, None, 2.0, scale_grad_by_freq, sparse, mode)
    found = _look_up_own(torch.embedding_bag, indices, weight, options, plain, distinct=True)
    result, bag_of, sizes, rows = _bagged(found, plain, weight, options)
    if rows.dim() == 2 and len(found.batch.ids):
        rows = torch.where(sizes[:, None] > 0, found.batch.ids[rows], 0)
    return result, bag_of, sizes, rows


def _are_own(*values: Any) -> bool:
    """Whether these arguments are this rank's own batch."""
    return settings.current().own_batches and not any(isinstance(value, Distributed) for value in values)


def _by_rule(of_own: Callable[..., Any], of_all: Callable[..., Any], *values: Any) -> Callable[..., Any]:
    return of_own if _are_own(*values) else of_all


def _register(op: Op, function: Callable[..., Any]) -> None:
    signature = inspect.signature(function)

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        """A sharded table; a plain one, in which sharded ids are looked up, is an operand as any other."""
        weight = signature.bind(*args, **kwargs).arguments["weight"]
        if not isinstance(weight, ShardedTensor):
            return descend(op, args, kwargs)
        with without_autocast():  # which leaves lookups alone
            return function(*args, **kwargs)

    registry.built_in[op] = handler


_register(functional.embedding, _embedding)
_register(functional.embedding_bag, _embedding_bag)
_register(torch.embedding, _embedding_below)
_register(torch.embedding_bag, _embedding_bag_below)
