"""Reading and writing at indices that are tensors. The dims that are indexed are whole; all others go apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.ops.engine.call import Call
from shardwise.ops.engine.compute import compute, expect
from shardwise.ops.engine.gathered import compute_gathered, needs_whole
from shardwise.ops.engine.rule import Along, Labels, Rule, broadcast_shapes
from shardwise.ops.engine.table import TABLE, add_rules
from shardwise.ops.families.reduction import SUM
from shardwise.ops.families.selection import require_mask, selected
from shardwise.process_group import is_member

aten = torch.ops.aten


def _index(call: Call) -> Rule | None:
    """x[i, :, j]: indexed dims whole; the indices, broadcast, are where the first of them stands, if together."""
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


def _index_tensors(x: torch.Tensor, indices: Sequence[Any]) -> list[Any]:
    """One index for each dim, or None: a mask is the indices of what it selects."""
    made: list[Any] = []
    for index in indices:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        made += index.nonzero().unbind(1) if is_mask else [index]
    return made + [None] * (x.ndim - len(made))


def _index_any(call: Call) -> Any:
    """Under the rule; a mask by what it selects; where all that is long is indexed, one index after another."""
    x, indices = call["self"], list(call["indices"])
    first, group = indices[0], call.sharded()[0]._frame.process_group
    if len(indices) == 1 and first.dtype == torch.bool and first.ndim and group is not None and is_member(group):
        return selected(x, first, call.sharded()[0])
    indices = _index_tensors(x, indices)
    at = [k for k, index in enumerate(indices) if index is not None]
    by_tensors = Call(aten.index.Tensor, (x, indices), {})
    rule = _index(by_tensors)
    found = NotImplemented if rule is None else compute(by_tensors, rule)
    if found is not NotImplemented or len(at) < 2 or at != list(range(at[0], at[-1] + 1)):
        return found
    shape = broadcast_shapes(*(indices[k].shape for k in at))
    spot = [indices[k].expand(shape) for k in at]
    found = x[(slice(None),) * at[0] + (spot[0],)]
    dim = at[0] + spot[0].ndim
    for k, index in zip(at[1:], spot[1:], strict=True):
        index = torch.where(index < 0, index + x.shape[k], index)
        wide = index.reshape(*[1] * at[0], *index.shape, *[1] * (found.ndim - dim))
        size = list(found.shape)
        size[dim] = 1
        found = torch.gather(found, dim, wide.expand(size)).squeeze(dim)  # the method of this name is another
    return found


def _index_put(call: Call) -> Any:
    """Indexed dims are whole, and so are the indices and what is written for each; the other dims go apart."""
    x, values, indices = call["self"], call["values"], list(call["indices"])
    mask = indices[0]
    if len(indices) == 1 and mask.dtype == torch.bool and values.numel() == 1 and not call["accumulate"]:
        require_mask(x, mask)
        mask = mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim))
        return torch.where(mask, values.reshape(()).to(x.dtype), x)
    indices = _index_tensors(x, indices)
    put = Call(call.op, (x, indices, values, call["accumulate"]), {})
    at = [k for k, index in enumerate(indices) if index is not None]
    labels = Labels()
    dims = labels.along(x.shape, whole=at)
    shape = broadcast_shapes(*(indices[k].shape for k in at))
    spot = labels.along(shape, whole=range(len(shape)))
    rest = [along for k, along in enumerate(dims) if k not in at]
    head = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    written = [*rest[:head], *spot, *rest[head:]]

    def against(shape: Sequence[int], wide: Sequence[Along | None]) -> list[Along | None]:
        pairs = zip(shape, wide[len(wide) - len(shape) :], strict=True)
        return [None if size == 1 and labels.sizes[along.label] != 1 else along for size, along in pairs]  # type: ignore[union-attr] # none is None

    operands = [dims, *(against(indices[k].shape, spot) for k in at), against(values.shape, written)]
    return compute(put, labels.rule(operands, [dims]))


def _shared_dims(call: Call, dim: int) -> Rule | None:
    """gather, scatter and the like: one dim is whole in each operand; the others are shared where all agree."""
    x = call["self"]
    if not x.ndim:
        return None
    dim %= x.ndim
    labels = Labels()
    shapes = [shape for shape in call.shapes if len(shape) == x.ndim]
    shared: list[Along | None] = []
    for k in range(x.ndim):
        agree = k != dim and len({shape[k] for shape in shapes}) == 1
        shared.append(labels.new(x.shape[k]) if agree else None)

    def dims(shape: torch.Size) -> list[Along | None]:
        if len(shape) != x.ndim:
            return labels.along(shape, whole=range(len(shape)))
        return [along or labels.new(shape[k], whole=True) for k, along in enumerate(shared)]

    operands = [dims(shape) for shape in call.shapes]
    return labels.rule(operands, [dims(size) for size, _ in expect(call)])


def _gather(call: Call) -> Rule | None:
    """The dim is whole in the source; in the index, it goes apart."""
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
    }  # its places count from the beginning
    return labels.rule([source, out], [out])


def _index_select(call: Call) -> Rule | None:
    x, index = call["self"], call["index"]
    if not x.ndim or index.ndim != 1:
        return None
    dim = call["dim"] % x.ndim
    labels = Labels()
    dims = labels.along(x.shape, whole=[dim])
    spot = labels.new(index.shape[0])
    return labels.rule([dims, [spot]], [[spot if k == dim else along for k, along in enumerate(dims)]])


def _along_index(call: Call) -> Rule | None:
    """index_add, index_copy, index_fill, index_reduce: the indexed dim is whole, the others go apart."""
    x = call["self"]
    if not x.ndim:
        return None
    dim = call["dim"] % x.ndim
    labels = Labels()
    dims = labels.along(x.shape, whole=[dim])
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
            operands.append(labels.along(operand.shape, whole=range(operand.ndim)))
    return labels.rule(operands, [dims])


def _index_fill(call: Call) -> Any:
    """Along a whole dim; else by a mask of the places that are filled, each counted once however often it is named."""
    rule = _along_index(call)
    found = NotImplemented if rule is None else compute(call, rule)
    x, index = call["self"], call["index"]
    if found is not NotImplemented or not x.ndim or index.ndim > 1:
        return found
    dim, extent = call["dim"] % x.ndim, x.shape[call["dim"]]
    index = torch.where(index < 0, index + extent, index).reshape(-1).long()
    counts = torch.zeros(extent, dtype=torch.int64, device=x.device)
    named = torch.scatter_add(counts, 0, index, torch.ones_like(index)) > 0
    return x.masked_fill(named.reshape([extent if k == dim else 1 for k in range(x.ndim)]), call["value"])


def _take_along(call: Call) -> Any:
    rule = _shared_dims(call, call["dim"])
    return NotImplemented if rule is None else compute(call, rule)


def _scatter_add(call: Call) -> Any:
    """Along a whole dim; where the index is cut along it, each cell adds up its own, and the sums are added."""
    found = _take_along(call)
    x, index, source = (call[name] for name in ("self", "index", "src"))
    if found is not NotImplemented or not x.ndim or index.ndim != x.ndim or index.shape != source.shape:
        return found
    dim = call["dim"] % x.ndim
    labels = Labels()
    spot = [labels.new(size, whole=k != dim and size != x.shape[k]) for k, size in enumerate(index.shape)]
    kept = [
        spot[k] if k != dim and size == index.shape[k] else labels.new(size, whole=True)
        for k, size in enumerate(x.shape)
    ]
    nothing = torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)  # of which each cell makes its own
    alone = Call(aten.scatter_add.default, (nothing, dim, index, source), {})
    if not alone.sharded():
        return NotImplemented
    made = compute(alone, labels.rule([kept, spot, spot], [kept], reduction=SUM))
    return made if made is NotImplemented else x + made


def _searched(call: Call) -> Rule | None:
    """bucketize: the boundaries are whole, the values go apart."""
    values, edges = call["self"], call["boundaries"]
    if not isinstance(values, torch.Tensor):
        return None
    labels = Labels()
    dims = labels.along(values.shape)
    return labels.rule([dims, labels.along(edges.shape, whole=[0])], [dims], hollow=True)


def _searchsorted(call: Call) -> Rule | None:
    """Sequences are whole; values go apart, and with them the sequences, unless there is one for all."""
    sequence, values = call["sorted_sequence"], call["self"]
    labels = Labels()
    dims = labels.along(values.shape)
    own = [*(dims[:-1] if sequence.ndim > 1 else []), labels.new(sequence.shape[-1], whole=True)]
    return labels.rule([own, dims, own][: len(call.operands)], [dims])  # the last is for a sorter


def _isin(call: Call) -> Rule | None:
    elements, tests = call["elements"], call["test_elements"]
    labels = Labels()
    dims = labels.along(elements.shape)
    return labels.rule([dims, labels.along(tests.shape, whole=range(tests.ndim))], [dims])


def _scattered(dims_of_source: str) -> Any:
    """select_scatter, slice_scatter: the dim that is written to is whole."""

    def rule(call: Call) -> Rule | None:
        x, source = call["self"], call["src"]
        dim = call["dim"] % x.ndim
        labels = Labels()
        dims = labels.along(x.shape, whole=[dim])
        other = [along for k, along in enumerate(dims) if k != dim]
        if dims_of_source == "same":
            other = list(dims)
            other[dim] = labels.new(source.shape[dim], whole=True)
        return labels.rule([dims, other], [dims])

    return rule


def _embedding(call: Call) -> Rule | None:
    """weight[indices]: all rows of the columns that a cell has."""
    weight, indices = call["weight"], call["indices"]
    labels = Labels()
    rows, columns = labels.along(weight.shape, whole=[0])
    spot = labels.along(indices.shape)
    return labels.rule([[rows, columns], spot], [[*spot, columns]])


def _embedding_bag(call: Call) -> Any:
    """torch chooses the form without gradient, for the wrapper wants none; its shards may."""
    op = aten._embedding_bag.default if call["weight"].requires_grad else call.op
    return compute_gathered(op, (), call.arguments, needs_whole(call))


add_rules(
    {
        aten.embedding: _embedding,
        aten.searchsorted.Tensor: _searchsorted,
        aten.gather: _gather,
        aten.index_select: _index_select,
        aten.index_add: _along_index,
        aten.index_copy: _along_index,
        aten.index_reduce: _along_index,
        aten.bucketize.Tensor: _searched,
        aten.isin.Tensor_Tensor: _isin,
        aten.select_scatter: _scattered("without"),
        aten.slice_scatter: _scattered("same"),
    }
)
TABLE[aten._embedding_bag_forward_only] = _embedding_bag
TABLE.update(dict.fromkeys((aten.index.Tensor, aten._unsafe_index.Tensor), _index_any))
TABLE[aten.index_put] = _index_put
TABLE.update(dict.fromkeys((aten.scatter, aten.scatter_reduce), _take_along))
TABLE[aten.scatter_add] = _scatter_add
TABLE[aten.index_fill] = _index_fill
