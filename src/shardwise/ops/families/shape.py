"""The same elements in another shape: views, transposes, expansions.

If possible, shards do not move, and results are views of them. A result whose shards have moved is a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwise.autograd.replicas import recorded
from shardwise.layout import Layout, Places
from shardwise.layout.geometry import Boxes
from shardwise.layout.specs import even_axis, spec_of
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.compute import assemble_like, compute, group_places
from shardwise.ops.engine.result_metadata import expected_results
from shardwise.ops.engine.rule import Along, Labels, Rule
from shardwise.ops.engine.table import TABLE, add_rules

aten = torch.ops.aten

# Under a rule --------------------------------------------------------------------------------------------------------


def _permuted(order: Callable[[Call], Sequence[int]]) -> Callable[[Call], Rule]:
    def rule(call: Call) -> Rule:
        labels = Labels()
        dims = labels.dims(call.operands[0].shape)
        return labels.rule([dims], [[dims[dim] for dim in order(call)]], allows_empty=True)

    return rule


def _transposition(call: Call) -> Sequence[int]:
    ndim = call.operands[0].ndim
    order = list(range(ndim))
    first, second = (call.arguments.get(name, default) for name, default in (("dim0", 0), ("dim1", 1)))
    if ndim:
        order[first % ndim], order[second % ndim] = order[second % ndim], order[first % ndim]
    return order


def _reversed_dims(call: Call) -> Sequence[int]:
    return range(call.operands[0].ndim - 1, -1, -1)


def _unsqueeze(call: Call) -> Rule:
    labels = Labels()
    dims = labels.dims(call.operands[0].shape)
    out = list(dims)
    out.insert(call["dim"] % (len(dims) + 1), None)
    return labels.rule([dims], [out], allows_empty=True)


def _squeezed_dims(call: Call) -> list[int]:
    shape = call.operands[0].shape
    given = call.arguments.get("dim")
    named = range(len(shape)) if given is None else [given] if isinstance(given, int) else given
    return [dim for dim in {d % max(len(shape), 1) for d in named} if dim < len(shape) and shape[dim] == 1]


def _squeeze(call: Call) -> Any:
    """Of every shard, only the dims that have one element in the whole tensor."""
    x, gone = call.operands[0], _squeezed_dims(call)
    labels = Labels()
    dims = [None if dim in gone else labels.new(size) for dim, size in enumerate(x.shape)]
    named = Call(aten.squeeze.dims, (x, gone), {})
    return compute(
        named, labels.rule([dims], [[along for dim, along in enumerate(dims) if dim not in gone]], allows_empty=True)
    )


def _expand(call: Call) -> Rule | None:
    """New dims, and dims of one element, may be cut without a transfer."""
    shape, (size, _) = call.operands[0].shape, expected_results(call)[0]
    labels = Labels()
    out = [labels.new(extent) for extent in size]
    skip = len(size) - len(shape)
    dims = [None if extent == 1 and size[skip + k] != 1 else out[skip + k] for k, extent in enumerate(shape)]
    return labels.rule([dims], [out], allows_empty=True, adapt=_with_cell_size("size"))


def _with_cell_size(name: str) -> Callable[[Call, list[list[int]]], dict[str, Any]]:
    """Let the argument for the size of the result be the size of the cell's result."""
    return lambda call, sizes: {name: sizes[0]}


def view_rule(call: Call) -> Rule | None:
    """Runs of dims with the same elements before and after share a label, on the first dim of each run."""
    before, (after, _) = call.operands[0].shape, expected_results(call)[0]
    if 0 in before:
        return None
    labels = Labels()
    dims: list[Along | None] = [None] * len(before)
    out: list[Along | None] = [None] * len(after)
    for old, new in _runs(before, after):
        total = math.prod(before[dim] for dim in old)
        heads = [next((dim for dim in run if shape[dim] > 1), None) for run, shape in ((old, before), (new, after))]
        if heads[0] is None or heads[1] is None:
            continue
        inner = [total // before[heads[0]], total // after[heads[1]]]
        step = math.lcm(*inner)
        label = labels.new(total // step)
        dims[heads[0]], out[heads[1]] = (Along(label.label, step // each) for each in inner)
        for run, shape, labelled, head in ((old, before, dims, heads[0]), (new, after, out, heads[1])):
            for dim in run:
                if dim != head and shape[dim] > 1:
                    labelled[dim] = labels.new(shape[dim], whole=True)
    return labels.rule([dims], [out], allows_empty=True, adapt=_view_size)


def _view_size(call: Call, sizes: list[list[int]]) -> dict[str, Any]:
    name = "size" if "size" in call.arguments else "shape"
    return {name: sizes[0]}


def _runs(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The shortest runs of dims, before and after, with the same number of elements."""
    runs = []
    i = j = 0
    while i < len(before) or j < len(after):
        old, new = ([i] if i < len(before) else []), ([j] if j < len(after) else [])
        i, j = i + len(old), j + len(new)
        a, b = math.prod(before[d] for d in old), math.prod(after[d] for d in new)
        while a != b:
            if a < b:
                old.append(i)
                a *= before[i]
                i += 1
            else:
                new.append(j)
                b *= after[j]
                j += 1
        runs.append((old, new))
    return runs


def _view(call: Call) -> Any:
    """A view or reshape. Shards are reshaped, for their strides may not allow a view."""
    if call.arguments.get("dtype") is not None:
        return NotImplemented
    name = "size" if "size" in call.arguments else "shape"
    reshape = Call(aten.reshape.default, (call.operands[0], call[name]), {})
    result = compute(reshape, view_rule(reshape))
    return _through_flat(call.operands[0], expected_results(reshape)[0][0]) if result is NotImplemented else result


def _through_flat(x: Any, after: Sequence[int]) -> Any:
    """Any reshape: redistributed to rows, then as stretches of the flattened tensor, then to rows of the new shape."""
    group = x._frame.process_group
    if group is None or not x.numel() or max(x.shape) == 1 or max(after) == 1:
        return NotImplemented
    places = group_places(x._layout, group)
    flat = torch.Size([x.numel()])
    layouts = [_in_rows(torch.Size(size), places) for size in (x.shape, after)]
    if any(_holds_all(layout) for layout in layouts):
        return NotImplemented
    runs = []
    for layout in layouts:
        inner = layout.boxes.volumes
        boxes = Boxes((np.cumsum(inner) - inner).reshape(-1, 1), inner.reshape(-1, 1))
        runs.append(Layout.of(flat, boxes, layout.places))
    rows = x._redistributed(spec_of(layouts[0]))
    stretches = _reshaped(rows, runs[0])._redistributed(spec_of(runs[1]))
    result = _reshaped(stretches, layouts[1])
    result._moved = True
    return result


def _in_rows(size: torch.Size, places: Places) -> Layout:
    """The first dim of more than one element, in chunks."""
    dim = next(dim for dim, extent in enumerate(size) if extent > 1)
    return Layout.by_rule(size, [even_axis(dim, size[dim], len(places))], places)


def _holds_all(layout: Layout) -> bool:
    return bool(len(layout.pattern.whole))


def _reshaped(x: Any, layout: Layout) -> Any:
    """The same local tensors as boxes of another layout."""
    tensors, anchor = recorded(x)
    rows = layout.rows_on(dist.get_rank())
    results = [local.reshape(layout.extent(row)) for local, row in zip(tensors, rows, strict=True)]
    return assemble_like(x, layout, results, anchor)


def _real(call: Call) -> Rule:
    labels = Labels()
    dims = labels.dims(call.operands[0].shape)
    return labels.rule([dims], [[*dims, labels.new(2, whole=True)]], allows_empty=True)


def _complex(call: Call) -> Rule:
    labels = Labels()
    dims = labels.dims(call.operands[0].shape, whole=[-1])
    return labels.rule([dims], [dims[:-1]])


def _repeat(call: Call) -> Any:
    """Repeated dims must be whole, others may be cut. A dim that is repeated 0 times is first narrowed to nothing."""
    x, times = call.operands[0], call["repeats"]
    skip = len(times) - x.ndim
    if 0 in times:
        nothing = x[(None,) * skip]
        for dim in (k for k, count in enumerate(times) if not count):
            nothing = nothing.narrow(dim, 0, 0)
        return nothing.repeat([max(count, 1) for count in times])
    (size, _), *_ = expected_results(call)
    labels = Labels()
    dims = [labels.new(extent, whole=times[skip + k] != 1) for k, extent in enumerate(x.shape)]
    out: list[Along | None] = [labels.new(extent, whole=True) for extent in size[:skip]]
    out += [along if times[skip + k] == 1 else labels.new(size[skip + k], whole=True) for k, along in enumerate(dims)]
    return compute(call, labels.rule([dims], [out]))


def _diag_embed(call: Call) -> Rule | None:
    x, ndim = call.operands[0], call.operands[0].ndim + 1
    pair = {call["dim1"] % ndim, call["dim2"] % ndim}
    labels = Labels()
    dims = labels.dims(x.shape, whole=[-1])
    (size, _), *_ = expected_results(call)
    rest = iter(dims[:-1])
    return labels.rule([dims], [[labels.new(e, whole=True) if k in pair else next(rest) for k, e in enumerate(size)]])


def _unfold(call: Call) -> Rule | None:
    x = call.operands[0]
    if not x.ndim:
        return None
    dim = call["dimension"] % x.ndim
    labels = Labels()
    dims = labels.dims(x.shape, whole=[dim])
    (size, _), *_ = expected_results(call)
    out = [labels.new(size[k], whole=True) if k == dim else along for k, along in enumerate(dims)]
    return labels.rule([dims], [[*out, labels.new(size[-1], whole=True)]])


add_rules(
    {
        aten.transpose: _permuted(_transposition),
        aten.t: _permuted(_reversed_dims),
        aten.numpy_T: _permuted(_reversed_dims),
        aten.permute: _permuted(lambda call: [dim % call.operands[0].ndim for dim in call["dims"]]),
        aten.unsqueeze: _unsqueeze,
        aten.expand: _expand,
        aten.view_as_real: _real,
        aten.view_as_complex: _complex,
        aten.diag_embed: _diag_embed,
        aten.unfold: _unfold,
        aten.transpose_copy: _permuted(_transposition),
        aten.t_copy: _permuted(_reversed_dims),
        aten.permute_copy: _permuted(lambda call: [dim % call.operands[0].ndim for dim in call["dims"]]),
        aten.unsqueeze_copy: _unsqueeze,
        aten.expand_copy: _expand,
        aten.unfold_copy: _unfold,
    }
)
TABLE.update(
    {
        aten.view.default: _view,
        aten._unsafe_view: _view,
        aten.view_copy.default: lambda call: _view(call).clone(),
        aten.reshape: _view,
        aten._reshape_copy: lambda call: _view(call).clone(),
        aten.squeeze: _squeeze,
        aten.squeeze_copy: lambda call: _squeeze(call).clone(),
        aten.repeat: _repeat,
    }
)
