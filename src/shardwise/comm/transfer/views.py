"""Pieces of local tensors: as views, copied as fast as can be, and as bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shardwise.torch_private import FakeTensor


def view_of(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """A box of a tensor, as a view."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def cut(box: tuple[list[int], list[int]], most: int) -> Iterator[tuple[list[int], list[int]]]:
    """A box in pieces of at most so many elements, cut along its first dims so that each is as whole as can be."""
    offsets, sizes = box
    rest = 1
    for size in sizes:
        rest *= size
    if rest <= most or rest <= 1:
        yield box
        return
    dim = next(k for k, size in enumerate(sizes) if size > 1)
    row = rest // sizes[dim]
    step = max(most // row, 1)
    for begin in range(0, sizes[dim], step):
        inner_offsets, inner_sizes = list(offsets), list(sizes)
        inner_offsets[dim] += begin
        inner_sizes[dim] = min(step, sizes[dim] - begin)
        yield from cut((inner_offsets, inner_sizes), most)


def as_data(tensor: torch.Tensor) -> torch.Tensor:
    """As `detach`, but for tensors of which nothing is recorded: a view of a view takes torch twice as long to make."""
    return tensor.detach() if tensor.requires_grad else tensor


def parts_of(buffer: torch.Tensor, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A run of memory that holds pieces one behind another: a part for each, of its shape."""
    if len(pieces) == 1:
        return [buffer.view(pieces[0].shape)]
    parts = buffer.split_with_sizes([piece.numel() for piece in pieces])
    return [part.view(piece.shape) for part, piece in zip(parts, pieces, strict=True)]


def address(tensor: torch.Tensor) -> int:
    """Where a tensor begins in memory. Tensors without data that would share memory have addresses in it, too."""
    if isinstance(tensor, FakeTensor):
        number: int = tensor.untyped_storage()._cdata
        return (number << 48) + int(tensor.storage_offset()) * tensor.element_size()
    return tensor.data_ptr()


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy one view into another. On a GPU in the widest units that both allow, which doubles the speed of slabs."""
    if source.device != target.device:
        source = resolved(source)  # torch loses a conjugation on the way to the host where rows are not contiguous
    elif source.is_cuda and target.is_cuda and source.dtype == target.dtype and is_as_it_lies(source, target):
        for unit in WIDE:
            if _comes_in(source, unit) and _comes_in(target, unit):
                source, target = source.view(unit), target.view(unit)
                break
    target.copy_(source)


WIDE = (torch.complex128, torch.float64)  # 16 and 8 bytes


def _comes_in(view: torch.Tensor, unit: torch.dtype) -> bool:
    """Whether each row of a view is whole units, and begins at one."""
    ratio = unit.itemsize // view.element_size()
    if ratio <= 1 or not view.dim() or view.stride(-1) != 1 or view.size(-1) % ratio:
        return False
    # Of a dim of one element too, though its stride is never walked: torch looks at it. It asks where a view begins in
    # its storage, as the kernels do in memory; a view without elements has no place there.
    begins = view.storage_offset() % ratio == 0 and address(view) % unit.itemsize == 0
    return begins and all(stride % ratio == 0 for stride in view.stride()[:-1])


def fits(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this memory can be sent, or received into, as it lies: on a device's wire, in a dtype."""
    same = tensor.dtype == dtype and tensor.device.type == device.type
    return same and tensor.is_contiguous() and is_as_it_lies(tensor)


def is_as_it_lies(*tensors: torch.Tensor) -> bool:
    """Whether the values are those in memory: torch may have put off to conjugate or negate them, or to write zeros."""
    for tensor in tensors:  # noqa: SIM110 # asked for every message: a generator takes twice as long
        if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            return False
    return True


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its memory holds its values, else a copy whose memory does."""
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor.clone() if tensor._is_zerotensor() else tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, whatever its dtype."""
    assert is_as_it_lies(tensor), "its memory does not hold its values"
    # Of one element, any stride is contiguous; `view` wants 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
