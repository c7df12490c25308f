"""Reading and writing at indices that are tensors. Indexed dims are whole; all others may be cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm.group import is_member
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.compute import compute
from shardwise.ops.engine.gathered import compute_gathered, needs_whole
from shardwise.ops.engine.result_metadata import expected_results
from shardwise.ops.engine.rule import Along, Labels, Rule, broadcast_shapes
from shardwise.ops.engine.table import TABLE, add_rules
from shardwise.ops.families.reduction import SUM
from shardwise.ops.families.selection import require_mask, select_by_mask

aten = torch.ops.aten


def _index(call: Call) -> Rule | None:
    """x[i, :, j]. The result has the broadcast indices in place of the first indexed dim if these are adjacent."""
    x, indices = call["self"], list(call["indices"])
    indices += [None] * (x.ndim - len(indices))
    given = [k for k, index in enumerate(indices) if index is not None]
    if not given or any(indices[k].dtype in (torch.bool, torch.uint8) for k in given) or len(indices) != x.ndim:
        return None
    labels = Labels()
    dims = [labels.new(size, whole=indices[k] is not None) for k, size in enumerate(x.shape)]
    shape = broadcast_shapes(*(indices[k].shape for k in given))
    spot = [labels.new(size) for size in shape]
    operands: list[list[Along | None]] = [dims]  # type: ignore[list-item] # all are labels
    for k in given:
        own = indices[k].shape
        skip = len(shape) - len(own)
        operands.append([None if size == 1 and shape[skip + d] != 1 else spot[skip + d] for d, size in enumerate(own)])
    rest = [along for k, along in enumerate(dims) if k not in given]
    together = given == list(range(given[0], given[-1] + 1))
    at = given[0] if together else 0
    return labels.rule(operands, [[*rest[:at], *spot, *rest[at:]]])


def index_tensors(x: torch.Tensor, indices: Sequence[Any]) -> list[Any]:
    """One index for each dim, or None; a mask becomes the indices that it selects."""
    results: list[Any] = []
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        results += index.nonzero().unbind(1) if is_mask else [index]
    return results + [None] * (x.ndim - len(results))


def _index_any(call: Call) -> Any:
    """Under the rule; else a single mask by each rank's chunk, and adjacent indices one after another."""
    x, indices = call["self"], list(call["indices"])
    first, group = indices[0], call.sharded()[0]._frame.process_group
    if len(indices) == 1 and first.dtype == torch.bool and first.ndim and group is not None and is_member(group):
        return select_by_mask(x, first, call.sharded()[0])
    indices = index_tensors(x, indices)
    at = [k for k, index in enumerate(indices) if index is not None]
    by_tensors = Call(aten.index.Tensor, (x, indices), {})
    result = compute(by_tensors, _index(by_tensors))
    if result is not NotImplemented or len(at) < 2 or at != list(range(at[0], at[-1] + 1)):
        return result
    shape = broadcast_shapes(*(indices[k].shape for k in at))
    spot = [indices[k].expand(shape) for k in at]
    result = x[(slice(None),) * at[0] + (spot[0],)]
    dim = at[0] + spot[0].ndim
    for k, index in zip(at[1:], spot[1:], strict=True):
        index = torch.where(index < 0, index + x.shape[k], index)
        wide = index.reshape(*[1] * at[0], *index.shape, *[1] * (result.ndim - dim))
        size = list(result.shape)
        size[dim] = 1
        result = torch.gather(result, dim, wide.expand(size)).squeeze(dim)  # the method of this name is another
    return result


def _index_put(call: Call) -> Any:
    """Indexed dims, indices and the values for them are whole; the other dims may be cut."""
    x, values, indices = call["self"], call["values"], list(call["indices"])
    mask = indices[0]
    if len(indices) == 1 and mask.dtype == torch.bool and values.numel() == 1 and not call["accumulate"]:
        require_mask(x, mask)
        mask = mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))
        return torch.where(mask, values.reshape(()).to(x.dtype), x)
    indices = index_tensors(x, indices)
    put = Call(call.op, (x, indices, values, call["accumulate"]), {})
    at = [k for k, index in enumerate(indices) if index is not None]
    labels = Labels()
    dims = labels.dims(x.shape, whole=at)
    shape = broadcast_shapes(*(indices[k].shape for k in at))
    spot = labels.dims(shape, whole=range(len(shape)))
    rest = [along for k, along in enumerate(dims) if k not in at]
    head = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    written = [*rest[:head], *spot, *rest[head:]]

    def against(shape: Sequence[int], wide: Sequence[Along | None]) -> list[Along | None]:
        pairs = zip(shape, wide[len(wide) - len(shape) :], strict=True)
        return [None if size == 1 and labels.sizes[along.label] != 1 else along for size, along in pairs]  # type: ignore[union-attr] # none is None

    operands = [dims, *(against(indices[k].shape, spot) for k in at), against(values.shape, written)]
    return compute(put, labels.rule(operands, [dims]))


def _scatter(call: Call) -> Rule | None:
    """scatter and the like: one dim is whole in each operand; a dim of the same size in all may be cut."""
    x = call["self"]
    if not x.ndim:
        return None
    dim = call["dim"] % x.ndim
    labels = Labels()
    shapes = [shape for shape in call.shapes if len(shape) == x.ndim]
    shared: list[Along | None] = []
    for k in range(x.ndim):
        agree = k != dim and len({shape[k] for shape in shapes}) == 1
        shared.append(labels.new(x.shape[k]) if agree else None)

    def dims(shape: torch.Size) -> list[Along | None]:
        if len(shape) != x.ndim:
            return labels.dims(shape, whole=range(len(shape)))
        return [along or labels.new(shape[k], whole=True) for k, along in enumerate(shared)]

    operands = [dims(shape) for shape in call.shapes]
    return labels.rule(operands, [dims(size) for size, _ in expected_results(call)])


def _gather(call: Call) -> Rule | None:
    """The dim is whole in the source, and may be cut in the index."""
    x, index = call["self"], call["index"]
    if not x.ndim or x.ndim != index.ndim:
        return None
    dim = call["dim"] % x.ndim
    labels = Labels()
    out = [labels.new(size) for size in index.shape]
    source = [
        out[k] if k != dim and size == index.shape[k] else labels.new(size, whole=True)
        for k, size in enumerate(x.shape)
    ]
    labels.whole |= {
        along.label for k, along in enumerate(out) if k != dim and x.shape[k] != index.shape[k]
    }  # the index reads the first elements of a longer dim
    return labels.rule([source, out], [out])


def raise_for_dtypes(call: Call) -> None:
    """Raise as torch does for an index of a wrong dtype: else only ranks that have some of it would raise.

    torch computes the call with one element of each operand.
    """
    small = {
        name: torch.zeros([1] * min(value.ndim, 1), dtype=value.dtype) if isinstance(value, torch.Tensor) else value
        for name, value in call.arguments.items()
    }
    by_position, by_name = call.split_arguments({**small, "dim": 0} if "dim" in small else small)
    call.op(*by_position, **by_name)


def _index_select(call: Call) -> Rule | None:
    x, index = call["self"], call["index"]
    raise_for_dtypes(call)
    if not x.ndim or index.ndim != 1:
        return None
    dim = call["dim"] % x.ndim
    labels = Labels()
    dims = labels.dims(x.shape, whole=[dim])
    spot = labels.new(index.shape[0])
    return labels.rule([dims, [spot]], [[spot if k == dim else along for k, along in enumerate(dims)]])


def _along_index(call: Call) -> Rule | None:
    """index_add, index_copy, index_fill, index_reduce: the indexed dim is whole, the others may be cut."""
    x = call["self"]
    raise_for_dtypes(call)
    if not x.ndim:
        return None
    dim = call["dim"] % x.ndim
    labels = Labels()
    dims = labels.dims(x.shape, whole=[dim])
    spot = labels.new(call["index"].numel(), whole=True)
    operands: list[list[Along | None]] = []
    for operand in call.operands:
        if operand is x:
            operands.append(dims)
        elif operand is call["index"]:
            operands.append([spot] if operand.ndim else [])
        elif operand.ndim == x.ndim:
            operands.append([spot if k == dim else along for k, along in enumerate(dims)])
        else:
            operands.append(labels.dims(operand.shape, whole=range(operand.ndim)))
    return labels.rule(operands, [dims])


def _index_fill(call: Call) -> Any:
    """Along a whole dim; else by a mask of the indexed elements."""
    result = compute(call, _along_index(call))
    x, index = call["self"], call["index"]
    if result is not NotImplemented or not x.ndim or index.ndim > 1:
        return result
    dim, extent = call["dim"] % x.ndim, x.shape[call["dim"]]
    index = torch.where(index < 0, index + extent, index).reshape(-1).long()
    counts = torch.zeros(extent, dtype=torch.int64, device=x.device)
    named = torch.scatter_add(counts, 0, index, torch.ones_like(index)) > 0
    return x.masked_fill(named.reshape([extent if k == dim else 1 for k in range(x.ndim)]), call["value"])


def _scatter_add(call: Call) -> Any:
    """Along a whole dim; if the index is cut along the dim, by partial sums of each cell."""
    result = compute(call, _scatter(call))
    x, index, source = (call[name] for name in ("self", "index", "src"))
    if result is not NotImplemented or not x.ndim or index.ndim != x.ndim or index.shape != source.shape:
        return result
    dim = call["dim"] % x.ndim
    labels = Labels()
    spot = [labels.new(size, whole=k != dim and size != x.shape[k]) for k, size in enumerate(index.shape)]
    kept = [
        spot[k] if k != dim and size == index.shape[k] else labels.new(size, whole=True)
        for k, size in enumerate(x.shape)
    ]
    nothing = torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)  # without memory
    alone = Call(aten.scatter_add.default, (nothing, dim, index, source), {})
    if not alone.sharded():
        return NotImplemented
    made = compute(alone, labels.rule([kept, spot, spot], [kept], reduction=SUM))
    return made if made is NotImplemented else x + made


def _bucketize(call: Call) -> Rule | None:
    """bucketize: the boundaries are whole, the values may be cut."""
    values, edges = call["self"], call["boundaries"]
    if not isinstance(values, torch.Tensor):
        return None
    labels = Labels()
    dims = labels.dims(values.shape)
    return labels.rule([dims, labels.dims(edges.shape, whole=[0])], [dims], allows_empty=True)


def _searchsorted(call: Call) -> Rule | None:
    """Sequences are whole; values may be cut, and batches of sequences with them."""
    sequence, values = call["sorted_sequence"], call["self"]
    labels = Labels()
    dims = labels.dims(values.shape)
    own = [*(dims[:-1] if sequence.ndim > 1 else []), labels.new(sequence.shape[-1], whole=True)]
    return labels.rule([own, dims, own][: len(call.operands)], [dims])  # the last is for a sorter


def _isin(call: Call) -> Rule | None:
    elements, tests = call["elements"], call["test_elements"]
    labels = Labels()
    dims = labels.dims(elements.shape)
    return labels.rule([dims, labels.dims(tests.shape, whole=range(tests.ndim))], [dims])


def _written_slice(*, keeps_dim: bool) -> Any:
    """select_scatter, slice_scatter: the dim that is written to is whole."""

    def rule(call: Call) -> Rule | None:
        x, source = call["self"], call["src"]
        dim = call["dim"] % x.ndim
        labels = Labels()
        dims = labels.dims(x.shape, whole=[dim])
        other = [along for k, along in enumerate(dims) if k != dim]
        if keeps_dim:
            other = list(dims)
            other[dim] = labels.new(source.shape[dim], whole=True)
        return labels.rule([dims, other], [dims])

    return rule


def _embedding(call: Call) -> Rule | None:
    """weight[indices]: rows are whole, columns and indices may be cut."""
    weight, indices = call["weight"], call["indices"]
    labels = Labels()
    rows, columns = labels.dims(weight.shape, whole=[0])
    spot = labels.dims(indices.shape)
    return labels.rule([[rows, columns], spot], [[*spot, columns]])


def _embedding_bag(call: Call) -> Any:
    """torch chooses the form without gradient by the wrapper; the shards may require one."""
    op = aten._embedding_bag.default if call["weight"].requires_grad else call.op
    return compute_gathered(op, (), call.arguments, needs_whole(call))


add_rules(
    {
        aten.embedding: _embedding,
        aten.searchsorted.Tensor: _searchsorted,
        aten.gather: _gather,
        aten.scatter: _scatter,
        aten.scatter_reduce: _scatter,
        aten.index_select: _index_select,
        aten.index_add: _along_index,
        aten.index_copy: _along_index,
        aten.index_reduce: _along_index,
        aten.bucketize.Tensor: _bucketize,
        aten.isin.Tensor_Tensor: _isin,
        aten.select_scatter: _written_slice(keeps_dim=False),
        aten.slice_scatter: _written_slice(keeps_dim=True),
    }
)
TABLE[aten._embedding_bag_forward_only] = _embedding_bag
TABLE.update(dict.fromkeys((aten.index.Tensor, aten._unsafe_index.Tensor), _index_any))
TABLE[aten.index_put] = _index_put
TABLE[aten.scatter_add] = _scatter_add
TABLE[aten.index_fill] = _index_fill
