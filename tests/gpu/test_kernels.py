"""Kernels that only CUDA has, or that give something else there: NCCL ranks that share one GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cases import assert_close
from tests.gpu.test_cuda import SIZE, specs
from torch import nn
from torch.nn import functional

import shardwise
from shardwise import ChunkShardingSpec, ReplicatedShardingSpec
from shardwise.errors import UnsupportedOpError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks, run_on_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PLACES = [f"rank:{rank}/cuda:0" for rank in range(4)]


def values(*size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The same on every rank."""
    return torch.randn(size, dtype=dtype, generator=torch.Generator("cuda:0").manual_seed(0), device="cuda:0")


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_what_is_conjugated_or_negated_later(backend: str) -> None:
    """Torch puts off conjugation and negation: shards on which it did so are moved as what they stand for."""
    run_on_ranks(4, move_conjugated, backend=backend)  # gloo takes them through the memory of the host


def move_conjugated() -> None:
    """Shards on which torch has put something off, moved."""
    for dtype in (torch.complex64, torch.complex128):
        plain = values(*SIZE, dtype=dtype)
        for spec in specs().values():
            for change in (torch.conj, lambda x: x.conj().imag, lambda x: x.conj().real):
                found, expected = change(shard_tensor(plain, spec)), change(plain)
                assert torch.equal(found.full_tensor(), expected.resolve_conj().resolve_neg())
                for other in specs().values():
                    for options in ({}, {"max_bytes": 48}):
                        moved = found.redistribute(other, **options)
                        assert torch.equal(moved.full_tensor(), expected.resolve_conj().resolve_neg())
    real = values(*SIZE)
    for function in (torch.fft.ifft, torch.fft.ihfft, torch.fft.fft):
        for dim in (0, 1):  # along one of which the result is not contiguous
            found = function(shard_tensor(real, ChunkShardingSpec(0, PLACES)), dim=dim)
            expected = function(real, dim=dim).resolve_conj()
            assert_close(torch.view_as_real(found.full_tensor()), torch.view_as_real(expected))


def compare_inverse_transforms() -> None:
    """Of real tensors, whose result torch conjugates only when it is looked at: any cut, any dim, both widths."""
    for dtype in (torch.float32, torch.float64):
        real = values(5, 6, 7, dtype=dtype)
        eps = torch.finfo(dtype).eps
        for function in (torch.fft.ifft, torch.fft.ihfft, torch.fft.fft, torch.fft.rfft, torch.fft.ifftn):
            for cut in range(3):
                for dim in range(3):
                    where = {"dim": (dim,)} if function is torch.fft.ifftn else {"dim": dim}
                    expected = function(real, **where).resolve_conj()
                    for _ in range(2):  # the second call may be done as is remembered of the first
                        made = function(shardwise.shard(real, cut), **where)
                        # Sums of at most 7 terms of at most 5: 2 * 7 * 35 eps apart, however they are added up.
                        for found in (made.full_tensor(), made.redistribute((cut + 1) % 3).full_tensor()):
                            torch.testing.assert_close(found, expected, rtol=0, atol=490 * eps)
                        on_host = made.cpu().full_tensor()
                        torch.testing.assert_close(on_host, expected.cpu(), rtol=0, atol=490 * eps)
        for change in (torch.conj, lambda x: x.conj().imag, lambda x: x.conj().transpose(0, 2)):
            plain = torch.complex(real, real.flip(0))
            expected = change(plain).resolve_conj().resolve_neg()
            for cut in range(3):
                found = change(shardwise.shard(plain, cut))
                assert torch.equal(found.full_tensor(), expected)
                target = change(shardwise.shard(torch.zeros_like(plain), cut))  # a view that is conjugated later
                assert torch.equal(target.copy_(shardwise.shard(expected, (cut + 1) % 3)).full_tensor(), expected)


@ranks(2, backend="gloo")
def test_inverse_transforms_through_memory_of_the_host() -> None:
    """On gloo ranks, which copy shards into pinned memory before they send them."""
    compare_inverse_transforms()


@ranks(2, backend="nccl")
def test_inverse_transforms_on_nccl() -> None:
    """On NCCL ranks, whose shards stay on the GPU."""
    compare_inverse_transforms()


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "LSTM": (lambda: nn.LSTM(6, 8, num_layers=2, bidirectional=True, batch_first=True), (5, 3, 6)),
    "GRU": (lambda: nn.GRU(6, 8, batch_first=True), (5, 3, 6)),
    "RNN": (lambda: nn.RNN(6, 8, batch_first=True), (5, 3, 6)),
    "LSTMCell": (lambda: nn.LSTMCell(6, 8), (5, 6)),
    "GRUCell": (lambda: nn.GRUCell(6, 8), (5, 6)),
    "Conv1d": (lambda: nn.Conv1d(6, 8, 3, padding=1), (5, 6, 7)),
    "Conv2d": (lambda: nn.Conv2d(6, 8, 3, groups=2), (5, 6, 7, 7)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(6, 8, 3), (5, 6, 4, 4)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(6), (5, 6, 4, 4)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(6, affine=True), (5, 6, 4, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), (5, 6, 4, 4)),
    "LayerNorm": (lambda: nn.LayerNorm(6), (5, 6)),
    "RMSNorm": (lambda: nn.RMSNorm(6), (5, 6)),
    "LogSigmoid": (lambda: nn.LogSigmoid(), (5, 6)),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), (5, 6, 4, 4)),
    "AdaptiveAvgPool2d": (lambda: nn.AdaptiveAvgPool2d(2), (5, 6, 4, 4)),
    "MultiheadAttention": (lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), (5, 3, 6)),
}


@pytest.mark.parametrize("name", MODULES)
@ranks(4, backend="nccl")
def test_modules(name: str) -> None:
    """With sharded inputs, and with sharded parameters: results and gradients as of the plain twin."""
    make, size = MODULES[name]
    with torch.device("cuda:0"):
        torch.manual_seed(0)
        plain = make().double()
        x = values(*size).requires_grad_()
        expected = _flat(plain(x))
        sum(((k + 1) * one.square().sum() for k, one in enumerate(expected)), torch.zeros(())).backward()
        for sharded_weights in (False, True):
            twin = make().double()
            twin.load_state_dict({**plain.state_dict(), **_buffers_before(make, plain)})
            if sharded_weights:
                for path, parameter in list(twin.named_parameters()):
                    owner = twin.get_submodule(path.rpartition(".")[0])
                    spec = ChunkShardingSpec(0, PLACES)
                    setattr(owner, path.rpartition(".")[2], nn.Parameter(shard_tensor(parameter.detach(), spec)))
            given = x.detach().clone() if sharded_weights else shard_tensor(x.detach(), ChunkShardingSpec(0, PLACES))
            given.requires_grad_()
            found = _flat(twin(given))
            sum(((k + 1) * one.square().sum() for k, one in enumerate(found)), torch.zeros(())).backward()
            for one, other in zip(found, expected, strict=True):
                assert_close(_whole(one.detach()), other.detach(), name)
            assert_close(_whole(given.grad), x.grad, name)
            for one, other in zip(twin.parameters(), plain.parameters(), strict=True):
                assert_close(_whole(one.grad), other.grad, name)
            for one, other in zip(twin.buffers(), plain.buffers(), strict=True):
                assert_close(_whole(one).double(), other.double(), name)


def _buffers_before(make: Callable[[], nn.Module], plain: nn.Module) -> dict[str, torch.Tensor]:
    fresh = make().double().state_dict()
    return {name: fresh[name] for name, _ in plain.named_buffers()}


def _flat(result: Any) -> list[Any]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, shardwise.ShardedTensor) else tensor


LOSSES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "cross_entropy": lambda x, y: functional.cross_entropy(x, y.argmax(1)),
    "soft cross_entropy": lambda x, y: functional.cross_entropy(x, y.softmax(1)),
    "smooth cross_entropy": lambda x, y: functional.cross_entropy(x, y.argmax(1), label_smoothing=0.1),
    "multilabel_soft_margin": lambda x, y: functional.multilabel_soft_margin_loss(x, (y > 0).double()),
    "multilabel_margin": lambda x, y: functional.multilabel_margin_loss(x, y.argsort(1)),
    "binary_cross_entropy": lambda x, y: functional.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "smooth_l1": lambda x, y: functional.smooth_l1_loss(x, y),
    "kl_div": lambda x, y: functional.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"),
}


@ranks(4, backend="nccl")
def test_losses() -> None:
    """Fused or not."""
    x, y = values(9, 6), values(9, 6).flip(0)
    for name, loss in LOSSES.items():
        plain = x.clone().requires_grad_()
        expected = loss(plain, y)
        expected.backward()
        for dim in (0, 1):
            sharded = shard_tensor(x, ChunkShardingSpec(dim, PLACES)).requires_grad_()
            found = loss(sharded, y)
            found.backward()
            assert_close(_whole(found.detach()), expected.detach(), name)
            assert_close(_whole(sharded.grad), plain.grad, name)


@ranks(4, backend="nccl")
def test_batch_norm_with_running_statistics_gives_what_was_used() -> None:
    """As the kernel of a GPU does, and that of a CPU does not."""
    x, weight, bias, mean = values(5, 6, 4), values(6), values(6) + 1, values(6) * 2
    variance = mean.square() + 0.5
    expected = torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.1, 1e-5)
    for dim in range(3):
        tensor = shard_tensor(x, ChunkShardingSpec(dim, PLACES))
        found = torch.native_batch_norm(tensor, weight, bias, mean, variance, False, 0.1, 1e-5)
        for one, other in zip(found, expected, strict=True):
            assert_close(_whole(one), other)


@ranks(4, backend="nccl")
def test_kernels_that_ask_nobody() -> None:
    """A kernel that torch compiles and starts without dispatching it raises; the device is as well as before."""
    square = torch.cuda.jiterator._create_jit_fn("template <typename T> T square(T x) { return x * x; }")
    for spec in (ChunkShardingSpec(0, PLACES), ReplicatedShardingSpec(PLACES)):
        x = shard_tensor(values(8, 8), spec)
        with pytest.raises(UnsupportedOpError, match=r"square was called on .* which has no memory of its own"):
            square(x)
        assert torch.equal(x.full_tensor(), values(8, 8))
