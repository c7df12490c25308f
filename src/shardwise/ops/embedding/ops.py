"""`embedding` and `embedding_bag` with a sharded table. Ids and their rows travel.

Sharded ids, as `from_local` makes them, are looked up on their ranks; of plain ids, which are the same on every rank,
each rank looks up a part. The result has the sharding of the ids. If every rank has all rows of its columns, plain ids
need no other rank, and the result has the sharding of the columns. Rows of a small batch are added up instead, by
``masked_sums``.

Under `own_batches`, plain ids are this rank's own batch, and so is the result, a plain tensor: the gradient of the
table is that of the losses of all ranks. Ids in a `ReplicatedTensor` are then one batch of all ranks, and so is the
result: its gradient counts once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from shardwise import settings
from shardwise.autograd.replicas import counted_once
from shardwise.comm.tracing import record
from shardwise.comm.transfer.wire import failing_together
from shardwise.ops.embedding.bags import local_bags
from shardwise.ops.embedding.differentiable_rows import forecast_rows
from shardwise.ops.embedding.local_rows import is_local, look_up_locally
from shardwise.ops.embedding.lookup import (
    LookupOptions,
    LookupRequest,
    LookupResult,
    look_up,
    padding_row,
    require_rows,
)
from shardwise.ops.embedding.masked_sums import add_up_rows, adds_up
from shardwise.ops.embedding.portion import concat_ids, local_portion, operand_summaries, wrap_rows
from shardwise.ops.engine.call_cache import cached_call
from shardwise.ops.engine.decomposition import call_decomposed
from shardwise.ops.engine.gathered import is_fully_replicated
from shardwise.ops.engine.steps import without_autocast
from shardwise.tensor import ShardedTensor
from shardwise.tensor.dispatch import Distributed, Op, registry
from shardwise.tensor.partial import ReplicatedTensor

Plain = Callable[..., Any]  # torch's own op on plain ids and a plain table


# Sharded ids, and plain ids that are the same on every rank ---------------------------------------------------------


def _embedding_of_shared(op: Op, ids: Any, weight: ShardedTensor, options: LookupOptions) -> Any:
    """A row for each id, on the rank of the id."""
    ids = _as_plain(ids, weight)
    if isinstance(ids, ReplicatedTensor):
        ids = ids.as_subclass(torch.Tensor)
    if not isinstance(ids, Distributed) and _needs_no_rank(weight, options):
        readable = ids.device.type == "cpu" and not record.is_forecast()  # elsewhere the host would wait for the values
        if readable and not weight._frame.rows:  # on other ranks the kernel reads the ids
            require_rows(ids, weight.shape[0])
        rest = (options.padding_idx, options.max_norm, options.norm_type, options.scale_grad_by_freq, options.sparse)
        try:
            return call_decomposed(functional.embedding, (ids, weight, *rest), {})
        except IndexError:
            require_rows(ids, weight.shape[0])
            raise
    if is_local(ids, weight, options):
        row = padding_row(options.padding_idx, weight.shape[0])
        try:
            return cached_call(functional.embedding, (ids, weight, row), {}, look_up_locally)
        except IndexError:
            with failing_together(weight._process_group):  # the ids of other ranks may be right
                for local in ids._local_tensors():
                    require_rows(local, weight.shape[0])
                raise
    if not weight.is_meta and adds_up(ids, weight, options):
        return cached_call(
            functional.embedding, (ids, weight, padding_row(options.padding_idx, weight.shape[0])), {}, add_up_rows
        )
    portion = local_portion(ids, weight)
    if weight.is_meta:
        count = sum(one.numel() for one in portion.tensors)
        return wrap_rows(portion.layout, torch.empty(count, weight.shape[1], dtype=weight.dtype, device="meta"), weight)
    if record.is_forecast():
        return wrap_rows(portion.layout, forecast_rows(weight, sum(one.numel() for one in portion.tensors)), weight)

    def request() -> LookupRequest:
        mine = concat_ids(portion.tensors, weight.device)
        return LookupRequest(
            mine, _check_with(functional.embedding, mine, options), operand_summaries(ids=ids), portion.counted()
        )

    batch, rows = look_up(op, weight, options, request, distinct=False)
    return wrap_rows(portion.layout, batch.spread(rows), weight)


def rows_of_shared(ids: Any, table: ShardedTensor) -> Any:
    """The row of each id, sharded or plain and the same on every rank, of a sharded table with two dims."""
    return _embedding_of_shared(functional.embedding, ids, table, LookupOptions())


def _bags_of_shared(op: Op, given: dict[str, Any], options: LookupOptions) -> Any:
    """A row for each bag, on the rank of its ids."""
    weight, ends = given["weight"], given.get("include_last_offset", False)
    ids, offsets = (_as_plain(given.get(name), weight) for name in ("input", "offsets"))
    samples = given.get("per_sample_weights")
    bags = local_bags(ids, offsets, samples, weight, ends=ends)
    plain: Plain = partial(functional.embedding_bag, mode=given["mode"])
    own = partial(plain, offsets=bags.offsets, per_sample_weights=bags.samples)

    def check(table: torch.Tensor) -> None:
        if bags.whole is not None:
            all_ids, all_offsets, weights = bags.whole
            whole = partial(plain, offsets=all_offsets, per_sample_weights=weights, include_last_offset=ends)
            _check_with(whole, all_ids, options)(table)
        _check_with(own, bags.ids, options)(table)

    about = operand_summaries(ids=ids, offsets=offsets, per_sample_weights=samples)
    request = partial(LookupRequest, bags.ids, check, about, bags.counted)
    result = look_up(op, weight, options, request, distinct=True)
    return wrap_rows(bags.layout, _bagged(result, own, weight, options), weight)


def _as_plain(value: Any, weight: ShardedTensor) -> Any:
    """Ids or offsets that are replicated on the whole group of the table, as plain ones."""
    if not isinstance(value, ShardedTensor) or value._process_group is not weight._process_group:
        return value
    return value._local_tensors()[0] if is_fully_replicated(value) else value


def _needs_no_rank(weight: ShardedTensor, options: LookupOptions) -> bool:
    """Whether plain ids need no other rank: each has all rows of its columns, and no op needs a whole row."""
    layout = weight._layout
    whole = layout.ndim == 2 and not layout.cuts(0)
    return whole and options.max_norm is None and not (options.sparse and layout.has_replicas)


# Each rank's own ids -------------------------------------------------------------------------------------------------


def _look_up_own(
    op: Op, ids: torch.Tensor, weight: ShardedTensor, options: LookupOptions, plain: Plain, **how: Any
) -> LookupResult:
    """The rows of this rank's own batch; of a batch of all ranks, only the first rank's ids count."""
    muted = isinstance(ids, ReplicatedTensor) and dist.get_rank(weight._process_group) > 0

    def request() -> LookupRequest:
        return LookupRequest(ids, _check_with(plain, ids, options), {}, torch.zeros_like(ids) if muted else None)

    batch, rows = look_up(op, weight, options, request, **how)
    return LookupResult(batch, counted_once(rows, False) if muted and rows.requires_grad else rows)


def _embedding_of_own(op: Op, ids: Any, weight: ShardedTensor, options: LookupOptions) -> torch.Tensor:
    """A row for each id. The rank of the padding's row leaves out its gradient."""
    batch, rows = _look_up_own(op, ids, weight, options, functional.embedding, distinct=False)
    return batch.spread(rows)


def _bags_of_own(op: Op, given: dict[str, Any], options: LookupOptions) -> Any:
    names = ("offsets", "mode", "per_sample_weights", "include_last_offset")
    plain = partial(functional.embedding_bag, **{name: given[name] for name in names if name in given})
    result = _look_up_own(op, given["input"], given["weight"], options, plain, distinct=True)
    return _bagged(result, plain, given["weight"], options)


# Both ----------------------------------------------------------------------------------------------------------------


def _check_with(plain: Plain, ids: torch.Tensor, options: LookupOptions) -> Callable[[torch.Tensor], None]:
    """A check of ids by torch's own op, on a table of one number."""

    def check(table: torch.Tensor) -> None:
        plain(torch.zeros_like(ids), table, scale_grad_by_freq=options.scale_grad_by_freq, sparse=options.sparse)

    return check


def _bagged(result: LookupResult, plain: Plain, weight: ShardedTensor, options: LookupOptions) -> Any:
    """The result of torch's own op on a small table of the rows that are needed."""
    padding = result.batch.index_of(padding_row(options.padding_idx, weight.shape[0]))
    return plain(result.batch.entries, result.rows, padding_idx=padding)


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
    options = LookupOptions(padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    return _own_or_shared(_embedding_of_own, _embedding_of_shared, input)(functional.embedding, input, weight, options)


def _embedding_below(
    weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    """`torch.embedding`, where a negative padding stands for none."""
    options = LookupOptions(None if padding_idx < 0 else padding_idx, None, 2.0, scale_grad_by_freq, sparse)
    return _own_or_shared(_embedding_of_own, _embedding_of_shared, indices)(torch.embedding, indices, weight, options)


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
    options = LookupOptions(padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, mode)
    tensors = (input, offsets, per_sample_weights)
    return _own_or_shared(_bags_of_own, _bags_of_shared, *tensors)(functional.embedding_bag, given, options)


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
    """`torch.embedding_bag`, which also gives the row of each maximum."""

    def plain(
        ids: Any, table: Any, scale_grad_by_freq: bool = False, sparse: bool = False, padding_idx: int | None = None
    ) -> Any:
        rest = (per_sample_weights, include_last_offset, padding_idx)
        return torch.embedding_bag(table, ids, offsets, scale_grad_by_freq, mode, sparse, *rest)

    if not _are_own(indices, offsets, per_sample_weights):
        return call_decomposed(
            torch.embedding_bag,
            (weight, indices, offsets, scale_grad_by_freq, mode, sparse),
            {
                "per_sample_weights": per_sample_weights,
                "include_last_offset": include_last_offset,
                "padding_idx": padding_idx,
            },
        )
    options = LookupOptions(padding_idx, None, 2.0, scale_grad_by_freq, sparse, mode)
    found = _look_up_own(torch.embedding_bag, indices, weight, options, plain, distinct=True)
    result, bag_of, sizes, rows = _bagged(found, plain, weight, options)
    if rows.dim() == 2 and len(found.batch.ids):
        rows = torch.where(sizes[:, None] > 0, found.batch.ids[rows], 0)
    return result, bag_of, sizes, rows


def _are_own(*values: Any) -> bool:
    """Whether these arguments are this rank's own batch."""
    return settings.current().own_batches and not any(isinstance(value, Distributed) for value in values)


def _own_or_shared(of_own: Callable[..., Any], of_all: Callable[..., Any], *values: Any) -> Callable[..., Any]:
    return of_own if _are_own(*values) else of_all


def _register(op: Op, function: Callable[..., Any]) -> None:
    position = list(inspect.signature(function).parameters).index("weight")

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        """With a sharded table; a plain one is an operand like any other."""
        weight = args[position] if len(args) > position else kwargs.get("weight")
        if not isinstance(weight, ShardedTensor):
            return call_decomposed(op, args, kwargs)
        with without_autocast():  # autocast does not apply to lookups
            return function(*args, **kwargs)

    registry.built_in[op] = handler


_register(functional.embedding, _embedding)
_register(functional.embedding_bag, _embedding_bag)
_register(torch.embedding, _embedding_below)
_register(torch.embedding_bag, _embedding_bag_below)
