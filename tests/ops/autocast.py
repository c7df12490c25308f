"""Calls of every op that torch's autocast treats, on a device: from torch's own samples, and some of our own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from benchmarks.coverage.database import Case, NoCases, cases, copied, is_dense, ops, seed
from torch.nn import functional as F  # noqa: N812 - as everybody writes it
from torch.utils import _pytree as pytree

import shardwise
from shardwise.tensor import ShardedTensorBase

APART = ("sparse", "ctc_loss", "jiterator", "fractional")  # without a rule, or drawn at random


def treated(device: str) -> set[str]:
    """The aten ops that autocast treats on a device, whatever it does with them: torch's dispatcher knows."""
    found = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device.upper()}")
    return {name.split("::")[1].split(".")[0] for name in found if name.startswith("aten::")}


def names_of(device: str) -> list[str]:
    """The entries of torch's database for these ops."""
    wanted = treated(device)
    return [
        name
        for name, op in ops().items()
        if wanted & {op.aten_name, op.name, op.name.split(".")[-1]} and not any(word in name for word in APART)
    ]


# What the database lacks, or has in sizes for which torch takes other kernels.
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "cdist of many": torch.cdist,
    "linear": F.linear,
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y),
    "cross_entropy": lambda x, y: F.cross_entropy(x, torch.arange(40) % 16, y[0].abs()),
    "smooth cross_entropy": lambda x, y: F.cross_entropy(x, y.softmax(1), label_smoothing=0.1),
    "nll_loss": lambda x, y: F.nll_loss(x.log_softmax(1), torch.arange(40) % 16),
    "nll_loss2d": lambda x, y: F.nll_loss(x.reshape(5, 8, 4, 4), torch.arange(80).reshape(5, 4, 4) % 8),
    "pad": lambda x, y: (F.pad(x[None], (2, 1), "reflect"), F.pad(y[None], (2, 1), "replicate")),
    "grid_sample": lambda x, y: F.grid_sample(x.reshape(5, 8, 4, 4), y.reshape(5, 8, 8, 2), align_corners=False),
    "inverse": lambda x, y: torch.inverse(x.reshape(10, 8, 8) + 9 * torch.eye(8, device=x.device)),
    "vecdot": torch.linalg.vecdot,
    "attention": lambda x, y: F.scaled_dot_product_attention(*[one.reshape(5, 2, 4, 16) for one in (x, y, x)]),
    "layer_norm": lambda x, y: F.layer_norm(x, (16,), y[0], y[1]),
    "batch_norm": lambda x, y: F.batch_norm(x, y[0], y[1].abs(), training=False),
    "softmax": lambda x, y: (x.softmax(1), y.log_softmax(0)),
    "norms": lambda x, y: (x.norm(), y.norm(dim=1)),
    "sums": lambda x, y: (x.sum(0), y.prod(0)),
    "addmm": lambda x, y: torch.addmm(x[:, 0], x, y.t()),
    "lstm cell": lambda x, y: torch.lstm_cell(
        x, (y, y), *(torch.ones(64, 16, device=x.device) / 16 for _ in range(2)), x.new_zeros(64), x.new_zeros(64)
    ),
    "cat": lambda x, y: torch.cat([x, y]),
    "embedding": lambda x, y: F.embedding(torch.arange(40, device=x.device) % 7, x) @ y.t(),
}


def compare(case: Callable[[list[Any]], Any], arguments: list[Any], device: str, dtype: torch.dtype, what: str) -> int:
    """Compare a call with the plain one within autocast: dtypes, and values within the rounding of these dtypes.

    With all tensors sharded, and with the first alone; each twice, for the second call may be done as is remembered.
    """

    def given(count: int) -> list[Any]:
        made = []
        for leaf in arguments:
            cut = is_dense(leaf) and leaf.ndim and count > 0
            count -= bool(cut)
            made.append(shardwise.shard(copied(leaf), 0) if cut else copied(leaf) if is_dense(leaf) else leaf)
        return made

    def within(count: int) -> list[Any]:
        seed()
        with warnings.catch_warnings(), torch.autocast(device, dtype):
            warnings.simplefilter("ignore")  # of kernels that this machine has not
            return pytree.tree_leaves(case(given(count)))

    try:
        expected = within(0)
    except (RuntimeError, NotImplementedError):  # which has no kernel for these dtypes
        return 0
    for count in (len(arguments), 1):
        for again in ("first", "second"):
            found = within(count)
            for one, other in zip(found, expected, strict=True):
                if isinstance(other, torch.Tensor) and other.layout == torch.strided:
                    _assert_alike(one, other, f"{what}, {dtype}, {count} sharded, {again} call")
    return 1


def _assert_alike(found: Any, expected: torch.Tensor, what: str) -> None:
    assert found.dtype == expected.dtype, f"{what}: {found.dtype} instead of {expected.dtype}"
    whole = found.full_tensor() if isinstance(found, ShardedTensorBase) else found
    assert whole.shape == expected.shape, what
    if not (expected.is_floating_point() or expected.is_complex()) or not expected.numel():
        return
    size = expected.abs().double().nan_to_num(0, 0, 0).max().item()
    # Products and sums in parts, each part rounded: a few units in the last place of the largest.
    close = 8 * torch.finfo(expected.dtype).eps * max(size, 1e-3)
    torch.testing.assert_close(whole, expected, rtol=0, atol=close, equal_nan=True, msg=lambda said: f"{what}: {said}")


def narrowed(arguments: list[Any], dtype: torch.dtype) -> Iterator[tuple[str, list[Any]]]:
    """The arguments as they are, all float32 ones shortened, and the first alone, so that autocast has to widen it."""
    yield "float32", arguments
    at = [k for k, leaf in enumerate(arguments) if is_dense(leaf) and leaf.dtype == torch.float32]
    for name, short in (("all short", at), ("first short", at[:1] if len(at) > 1 else [])):
        if short:
            yield name, [leaf.to(dtype) if k in short else leaf for k, leaf in enumerate(arguments)]


def compare_database(names: list[str], device: str, dtype: torch.dtype, *, most: int = 2) -> int:
    """Compare so many calls that torch's database has for each of these names; gives how many there were."""
    count = 0
    for name in names:
        try:
            found: list[Case] = cases(name, most, device)
        except NoCases:
            continue
        for case in found:
            if case.random or case.uninitialised or case.unwritten:
                continue
            for kind, arguments in narrowed(case.plain(grad=False), dtype):
                count += compare(case.run, arguments, device, dtype, f"{name} ({case}), {kind}")
    return count


def compare_calls(device: str, dtype: torch.dtype) -> None:
    """Compare the calls of this page."""
    generator = torch.Generator(device).manual_seed(0)
    x, y = torch.randn(2, 40, 16, generator=generator, device=device)
    for name, function in CALLS.items():
        for kind, arguments in narrowed([x, y], dtype):
            compare(lambda given, function=function: function(*given), arguments, device, dtype, f"{name}, {kind}")
