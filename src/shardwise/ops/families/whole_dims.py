"""Ops that need some dims whole, whatever the others: softmax, sort, fft, pooling, linear algebra and more.

An operand that is cut along such a dim is redistributed first, cut along another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardwise.ops.engine.call import Call
from shardwise.ops.engine.result_metadata import expected_results
from shardwise.ops.engine.rule import Along, Dims, Labels, Rule, broadcast_shapes
from shardwise.ops.engine.table import DECOMPOSED_UNDER_AUTOCAST, TABLE, RuleMaker, add_rules, by_rule

aten = torch.ops.aten

Whole = Callable[[Call], Sequence[int]]  # the dims that must be whole


def dims_argument(name: str = "dim") -> Whole:
    """The dim, or dims, that an argument names; all dims if it names none."""

    def dims(call: Call) -> Sequence[int]:
        given = call.arguments.get(name)
        if given is None or (isinstance(given, list | tuple) and not given):
            return range(call.operands[0].ndim)
        return [given] if isinstance(given, int) else list(given)

    return dims


def same_dims(whole: Whole) -> RuleMaker:
    """All results have the operand's dims; those that must be whole may have another size in a result."""

    def rule(call: Call) -> Rule | None:
        x = call.operands[0]
        if not x.ndim or len(call.operands) > 1:
            return None
        labels = Labels()
        dims = labels.dims(x.shape, whole=whole(call))
        return labels.rule([dims], [_result_dims(labels, dims, size) for size, _ in expected_results(call)])

    return rule


def _result_dims(labels: Labels, dims: Sequence[Along | None], size: Sequence[int]) -> Dims:
    """The dims of a result: those of the operand where the size is the same, else new ones that are whole."""
    if len(size) != len(dims):
        return tuple(labels.new(extent, whole=True) for extent in size)
    return tuple(
        along if along is not None and labels.sizes[along.label] == extent else labels.new(extent, whole=True)
        for along, extent in zip(dims, size, strict=True)
    )


def batched(*core: int) -> RuleMaker:
    """Operands with these numbers of last dims of their own; the dims before are a batch, and are broadcast."""

    def rule(call: Call) -> Rule | None:
        labels = Labels()
        shapes = call.shapes
        if len(shapes) > len(core):
            return None
        heads = [tuple(shape[: max(len(shape) - own, 0)]) for shape, own in zip(shapes, core, strict=False)]
        batch = broadcast_shapes(*heads)
        out = [labels.new(size) for size in batch]
        operands = []
        for shape, head in zip(shapes, heads, strict=True):
            skip = len(batch) - len(head)
            lead = [None if size == 1 and batch[skip + k] != 1 else out[skip + k] for k, size in enumerate(head)]
            operands.append([*lead, *(labels.new(size, whole=True) for size in shape[len(head) :])])
        results = []
        for size, _ in expected_results(call):
            if tuple(size[: len(batch)]) != tuple(batch):
                return None
            results.append([*out, *(labels.new(extent, whole=True) for extent in size[len(batch) :])])
        return labels.rule(operands, results)

    return rule


def leading(count: int) -> RuleMaker:
    """All operands and results share their first dims (samples, channels), and need the others whole."""

    def rule(call: Call) -> Rule | None:
        labels = Labels()
        first = call.operands[0].shape
        shared = [labels.new(size) for size in first[:count]]

        def dims(shape: Sequence[int]) -> list[Along | None] | None:
            if tuple(shape[:count]) != tuple(first[:count]):
                return None
            return [*shared, *(labels.new(size, whole=True) for size in shape[count:])]

        operands = [dims(shape) for shape in call.shapes]
        results = [dims(size) for size, _ in expected_results(call)]
        if any(one is None for one in [*operands, *results]):
            return None
        return labels.rule(operands, results)  # type: ignore[arg-type] # none is None

    return rule


def spatial(dims: int) -> RuleMaker:
    """Pooling, padding, resampling: the last dims are space, and whole; samples and channels may be cut."""

    def rule(call: Call) -> Rule | None:
        return leading(max(call.operands[0].ndim - dims, 0))(call) if call.operands[0].ndim > dims else None

    return rule


def _fractional_pool(call: Call) -> Rule | None:
    """Samples and channels may be cut, and the random samples of each with them."""
    return leading(2)(call) if call["self"].ndim == 2 + len(call["output_size"]) else None


def _padding(call: Call) -> Sequence[int]:
    return [call.operands[0].ndim - 1 - k // 2 for k, amount in enumerate(call["pad"]) if amount]


def _cross(call: Call) -> Rule | None:
    x, y = call.operands
    if x.shape != y.shape:
        return None
    labels = Labels()
    dims = labels.dims(x.shape, whole=[call["dim"]])
    return labels.rule([dims, dims], [dims])


def _triangle(call: Call) -> Rule | None:
    x = call.operands[0]
    labels = Labels()
    dims = labels.dims(x.shape, whole=[-2, -1])
    return labels.rule([dims], [dims])


def _renorm(call: Call) -> Rule | None:
    x = call.operands[0]
    labels = Labels()
    dims = labels.dims(x.shape, whole=[dim for dim in range(x.ndim) if dim != call["dim"] % x.ndim])
    return labels.rule([dims], [dims])


def _roll(call: Call) -> Sequence[int]:
    return call["dims"] or range(call.operands[0].ndim)


def _solve(call: Call) -> Rule | None:
    """One system or a batch of them; the right-hand sides are vectors or matrices."""
    a, b = call["A"], call["B"]
    is_vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    return batched(2, 1 if is_vector else 2)(call)


def _im2col(call: Call) -> Rule | None:
    return leading(1)(call) if call.operands[0].ndim == 4 else None


ALONG_DIM = [
    *("_softmax", "_log_softmax", "_safe_softmax", "topk", "glu", "_weight_norm_interface"),
    *("_fft_r2c", "_fft_c2c", "_fft_c2r"),
]
MATRIX = [  # square or not, one operand
    *("_linalg_svd", "_linalg_eigh", "linalg_eig", "linalg_qr", "linalg_inv_ex", "linalg_cholesky_ex", "cholesky"),
    *("linalg_lu_factor_ex", "linalg_lu", "_linalg_slogdet", "_linalg_det", "linalg_matrix_exp", "cholesky_inverse"),
    *("linalg_ldl_factor_ex", "geqrf", "inverse", "pinverse"),
]
SPACE = {
    **dict.fromkeys(["reflection_pad1d", "replication_pad1d", "upsample_nearest1d", "upsample_linear1d"], 1),
    **dict.fromkeys(["_upsample_nearest_exact1d", "adaptive_max_pool1d", "max_pool1d_with_indices"], 1),
    **dict.fromkeys(["reflection_pad2d", "replication_pad2d", "_adaptive_avg_pool2d", "avg_pool2d"], 2),
    **dict.fromkeys(["max_pool2d_with_indices", "adaptive_max_pool2d", "upsample_nearest2d"], 2),
    **dict.fromkeys(["upsample_bilinear2d", "upsample_bicubic2d", "_upsample_nearest_exact2d"], 2),
    **dict.fromkeys(["_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "max_unpool2d"], 2),
    **dict.fromkeys(["reflection_pad3d", "replication_pad3d", "_adaptive_avg_pool3d", "avg_pool3d"], 3),
    **dict.fromkeys(["max_pool3d_with_indices", "adaptive_max_pool3d", "upsample_nearest3d"], 3),
    **dict.fromkeys(["upsample_trilinear3d", "_upsample_nearest_exact3d", "max_unpool3d"], 3),
    **dict.fromkeys(["pixel_shuffle", "pixel_unshuffle"], 3),
}

for _name in ALONG_DIM:
    TABLE[getattr(aten, _name)] = by_rule(same_dims(dims_argument()))
for _name in MATRIX:
    TABLE[getattr(aten, _name)] = by_rule(batched(2))
for _name, _dims in SPACE.items():
    if hasattr(aten, _name):
        TABLE[getattr(aten, _name)] = by_rule(spatial(_dims))
        if hasattr(getattr(aten, _name), "vec"):  # decomposed into the op itself
            DECOMPOSED_UNDER_AUTOCAST.add(getattr(aten, _name).vec)
add_rules(
    {
        aten.sort: same_dims(dims_argument()),
        aten.roll: same_dims(_roll),
        aten.rot90: same_dims(dims_argument("dims")),
        aten.tril: _triangle,
        aten.triu: _triangle,
        aten.renorm: _renorm,
        aten.constant_pad_nd: same_dims(_padding),
        aten.channel_shuffle: leading(1),
        aten.grid_sampler_2d: leading(1),
        aten.grid_sampler_3d: leading(1),
        aten.im2col: _im2col,
        aten.col2im: leading(1),
        aten.linalg_cross: _cross,
        aten.linalg_solve_triangular: batched(2, 2),
        aten._linalg_solve_ex: _solve,
        aten.linalg_pinv: batched(2, 0, 0),
        aten.fractional_max_pool2d: _fractional_pool,
        aten.fractional_max_pool3d: _fractional_pool,
        aten.triangular_solve: batched(2, 2),
        aten.cholesky_solve: batched(2, 2),
        aten.linalg_lu_solve: batched(2, 1, 2),
        aten.lu_unpack: batched(2, 1),
        aten.linalg_householder_product: batched(2, 1),
        aten.ormqr: batched(2, 1, 2),
        aten.linalg_lstsq: batched(2, 2),
        aten.linalg_ldl_solve: batched(2, 1, 2),
    }
)
