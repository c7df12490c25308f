"""The random numbers of a plain tensor, read from any position on, in pieces of bounded size.

Torch fills a contiguous tensor in the order of its elements, and a long draw equals several shorter ones:

- On a CPU the numbers come one after the other. Chunks of a tensor are drawn in turn, and chunks that no box needs
  are dropped; a rank pays for the whole tensor.
- On CUDA a number depends on the seed and a counter. All threads of the device draw once for each `chunk` of elements,
  then the counter goes on, so a chunk is drawn by itself where the generator's offset is set to the chunk's own.

Whether a function of torch behaves so is tried once for each function, dtype and device (`_splits_on_cpu`,
`_step_on_cuda`). Any other function draws all elements at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch

from shardwise.comm.group import is_capturing
from shardwise.tensor.random.generators import Draw, is_counter_based
from shardwise.tensor.random.tiles import Box

CHUNK = 1 << 18  # elements that a CPU draws at a time
TOGETHER = 16  # elements that a normal distribution draws together; it draws the last 16 again if fewer are left
BLOCK = {"cpu": 1 << 22, "cuda": 1 << 24}  # elements that are read at a time, at most
THREADS = 256  # of a block of the kernels that draw
UNROLL = 4  # numbers that a thread draws at a time, and what the counter goes on by
BY_WIDTH = {4: torch.float32, 8: torch.bfloat16}  # dtypes of which a vector has so many elements
MOST_AT_ONCE = 2**30  # bytes that torch's kernels draw at once on CUDA: up to twice as many


def fill_flat(
    draw: Draw, size: Sequence[int], boxes: Sequence[Box], tensors: Sequence[torch.Tensor], numbers: Numbers
) -> None:
    """Fill tensors that are these boxes of a tensor of this size."""
    if len(tensors) == 1 and tensors[0].shape == torch.Size(size) and numbers.can_be_drawn_into(tensors[0]):
        draw.into(tensors[0], numbers.generator)  # all of it is here
        return
    for low, high in blocks(size, BLOCK.get(numbers.device.type, CHUNK)):
        common = [(_common(low, high, box), box[0], tensor) for box, tensor in zip(boxes, tensors, strict=True)]
        parts = [(*part, offsets, tensor) for part, offsets, tensor in common if part is not None]
        if not parts:
            continue
        sizes = [b - a for a, b in zip(low, high, strict=True)]
        start = _position(low, size)
        values = numbers.read(start, start + math.prod(sizes)).view(sizes)
        for begin, end, offsets, tensor in parts:
            target = tensor[tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, offsets, strict=True))]
            target.copy_(values[tuple(slice(a - c, b - c) for a, b, c in zip(begin, end, low, strict=True))])
    numbers.finish()


def blocks(size: Sequence[int], most: int) -> Iterator[Box]:
    """Boxes that cover a tensor of this size in order, each contiguous and of at most so many elements."""
    if not size:
        yield (), ()
        return
    dim = next(dim for dim in range(len(size)) if math.prod(size[dim + 1 :]) <= most)
    rest = list(size[dim + 1 :])
    step = max(most // max(math.prod(rest), 1), 1)
    for place in itertools.product(*map(range, size[:dim])):
        for begin in range(0, size[dim], step):
            low = [*place, begin, *(0 for _ in rest)]
            yield low, [*(k + 1 for k in place), min(begin + step, size[dim]), *rest]


def _common(low: Sequence[int], high: Sequence[int], box: Box) -> tuple[list[int], list[int]] | None:
    begin = [max(a, o) for a, o in zip(low, box[0], strict=True)]
    end = [min(a, e) for a, e in zip(high, box[1], strict=True)]
    return (begin, end) if all(a < b for a, b in zip(begin, end, strict=True)) else None


def _position(index: Sequence[int], size: Sequence[int]) -> int:
    position = 0
    for k, n in zip(index, size, strict=True):
        position = position * n + k
    return position


class Numbers:
    """The numbers that a draw gives a plain tensor, read in ascending order."""

    def __init__(
        self, draw: Draw, total: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
    ) -> None:
        self.draw, self.total, self.dtype, self.device, self.generator = draw, total, dtype, device, generator
        self.drawn = 0  # elements
        self.chunk = CHUNK if device.type == "cpu" and _splits_on_cpu(_example(draw), dtype) else total
        self._chunks: list[tuple[int, torch.Tensor]] = []  # with the position of the first element

    def can_be_drawn_into(self, whole: torch.Tensor) -> bool:
        """Whether torch's draw into this tensor of all elements gives just these numbers."""
        return whole.is_contiguous()

    def read(self, start: int, end: int) -> torch.Tensor:
        """The numbers at these positions."""
        while self.drawn < end:
            self._next()
        self._chunks = [(at, values) for at, values in self._chunks if at + values.numel() > start]
        first = self._chunks[0][0]
        values = torch.cat([values for _, values in self._chunks]) if len(self._chunks) > 1 else self._chunks[0][1]
        return values[start - first : end - first]

    def _next(self) -> None:
        end = min(self.drawn + self.chunk, self.total)
        if self.total - end < TOGETHER:
            end = self.total
        values = torch.empty(end - self.drawn, dtype=self.dtype, device=self.device)
        self.draw.into(values, self.generator)
        self._chunks.append((self.drawn, values))
        self.drawn = end

    def finish(self) -> None:
        """Advance the generator as after the whole draw."""
        while self.drawn < self.total:
            self._chunks.clear()
            self._next()
        self._chunks.clear()


class CountedNumbers(Numbers):
    """The numbers on CUDA, read in any order: chunk ``k`` is drawn at offset ``k * step``.

    A thread goes through one round for each `UNROLL` of the offset. A chunk takes several rounds where a thread makes
    fewer numbers in a round, as of 8 bytes. The last chunk may take fewer rounds than the others.
    """

    def __init__(
        self,
        draw: Draw,
        total: int,
        dtype: torch.dtype,
        device: torch.device,
        generator: torch.Generator,
        step: int,
    ) -> None:
        self.draw, self.total, self.dtype, self.device, self.generator = draw, total, dtype, device, generator
        self.step, self.begin = step, generator.get_offset()
        self.chunk = chunk_on(device)

    def can_be_drawn_into(self, whole: torch.Tensor) -> bool:
        """Not if torch draws it in several parts, which it does where its kernels cannot count the bytes."""
        return whole.is_contiguous() and whole.nbytes <= MOST_AT_ONCE

    def read(self, start: int, end: int) -> torch.Tensor:
        """The numbers at these positions."""
        first, last = start // self.chunk, -(-end // self.chunk)
        first, last = first - first % self.draw.chunks, last + -last % self.draw.chunks
        self.generator.set_offset(self.begin + first * self.step)
        values = torch.empty((last - first) * self.chunk, dtype=self.dtype, device=self.device)
        self.draw.into(values, self.generator)
        return values[start - first * self.chunk : end - first * self.chunk]

    def finish(self) -> None:
        """Advance the generator as after the whole draw."""
        rounds = -(-self.total * (self.step // UNROLL) // self.chunk)
        self.generator.set_offset(self.begin + rounds * UNROLL)


def chunk_on(device: torch.device) -> int:
    """The elements that all threads of a device draw before the counter advances; 0 without such a counter."""
    if device.type != "cuda":
        return 0
    about = torch.cuda.get_device_properties(device)
    return about.multi_processor_count * (about.max_threads_per_multi_processor // THREADS) * THREADS * UNROLL


def bernoulli_by_vectors(
    tensor: torch.Tensor, p: float = 0.5, width: int = UNROLL, generator: torch.Generator | None = None
) -> torch.Tensor:
    """``tensor.bernoulli_(p)`` on CUDA in the order of torch's fused dropout: a thread draws for neighbours.

    Other kernels have a thread draw for elements that are as far apart as there are threads. The width of a vector is
    what a thread draws at a time, or twice that.
    """
    chunk, count = chunk_on(tensor.device), tensor.numel()
    if not count:
        return tensor.bernoulli_(p, generator=generator)
    if is_capturing():  # where the offset cannot be set: by the fused dropout itself
        like = torch.empty(count, dtype=BY_WIDTH[width], device=tensor.device)
        return tensor.copy_(torch.native_dropout(like, 1 - p, True)[1].view(tensor.shape))
    source = torch.cuda.default_generators[tensor.device.index] if generator is None else generator
    begin, vectors = source.get_offset(), -(-count // (chunk * width // UNROLL))
    drawn = torch.empty((vectors, width, chunk // UNROLL), dtype=tensor.dtype, device=tensor.device)
    drawn.bernoulli_(p, generator=generator)
    source.set_offset(begin + -(-count // chunk) * UNROLL)
    return tensor.copy_(drawn.transpose(1, 2).flatten()[:count].view(tensor.shape))


def numbers_of(
    draw: Draw, total: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Numbers | None:
    """The numbers of a plain tensor of so many elements; None if a rank cannot read them cheaply."""
    if not is_counter_based(generator):
        return Numbers(draw, total, dtype, device, generator) if total <= draw.most else None
    chunk = chunk_on(device)
    if total <= chunk or is_capturing():  # in a graph the offset cannot be set
        return Numbers(draw, total, dtype, device, generator)
    step = _step_on_cuda(_example(draw), dtype, device)
    return None if step is None else CountedNumbers(draw, total, dtype, device, generator, step)


def _example(draw: Draw) -> Draw:
    """A draw by the same kernels: few of them depend on the parameters."""
    if draw.function in (torch.Tensor.random_, bernoulli_by_vectors):
        return draw
    return Draw(draw.function, (0.5,) if draw.function is torch.Tensor.geometric_ else ())


@lru_cache(maxsize=256)
def follows_memory(draw: Draw, dtype: torch.dtype) -> bool:
    """Whether a draw on a CPU fills a transposed tensor in the order of its memory: some builds of torch do not."""
    generator, size = torch.Generator(), (9, 8)
    flat, transposed = torch.empty(72, dtype=dtype), torch.empty(size, dtype=dtype).t()
    for tensor in (flat, transposed):
        generator.manual_seed(0)
        draw.into(tensor, generator)
    return torch.equal(transposed.t().reshape(-1), flat)


@lru_cache(maxsize=256)
def _splits_on_cpu(draw: Draw, dtype: torch.dtype) -> bool:
    """Whether a long draw on a CPU is several shorter ones in turn."""
    generator, length = torch.Generator(), 1 << 12
    found = []
    for lengths in ([3 * length + TOGETHER + 1], [length, length, length + TOGETHER + 1]):
        generator.manual_seed(0)
        values = [torch.empty(count, dtype=dtype, device="cpu") for count in lengths]  # whatever the default is
        for one in values:
            draw.into(one, generator)
        found.append((torch.cat(values), generator.get_state()))
    return all(map(torch.equal, *found))


@lru_cache(maxsize=256)
def _step_on_cuda(draw: Draw, dtype: torch.dtype, device: torch.device) -> int | None:
    """The counter's step for a chunk, if a long draw on this device is a draw of chunks; else None."""
    chunk, generator = chunk_on(device), torch.Generator(device)
    found: int | None = None
    for length in (3 * chunk, 2 * chunk + 3):  # a last chunk that is full, and one that takes one round at most
        whole = torch.empty(length, dtype=dtype, device=device)
        draw.into(whole, generator.manual_seed(0))
        advance = generator.get_offset()
        step, rest = divmod(advance, 3) if found is None else (found, 0)
        if rest or step % UNROLL:
            return None
        counted = CountedNumbers(draw, length, dtype, device, generator.manual_seed(0), step)
        same = torch.equal(counted.read(chunk + 1, length), whole[chunk + 1 :])
        counted.finish()
        if not same or generator.get_offset() != advance:
            return None
        found = step
    return found
