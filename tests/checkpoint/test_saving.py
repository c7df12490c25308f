"""Saved on four ranks, loaded on any number of ranks into any layout: the same values, and few bytes read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from tests.cases import ALL, PLAIN, SIZE, boxes, chunks, holds, places
from tests.checkpoint.files import file_of

import shardwise
from shardwise import GridShardingSpec, ReplicatedShardingSpec, ShardingSpec, empty, zeros
from shardwise.checkpoint import read_index
from shardwise.tensor import shard_tensor
from shardwise.tensor.partial import ReplicatedTensor
from shardwise.testing import ranks, run_on_ranks

# What to load into, by the number of ranks.
TARGETS: dict[int, dict[str, ShardingSpec]] = {
    1: {"whole": chunks(0, 0), "boxes": boxes(([0, 0], [7, 1], 0), ([0, 1], [7, 5], 0))},
    2: {"columns": chunks(1, 1, 0), "replicated": ReplicatedShardingSpec(places(0, 1)), "nobody on 0": chunks(0, 1)},
    3: {
        "rows": chunks(0, 0, 1, 2),
        "uneven": boxes(([0, 0], [2, 6], 2), ([2, 0], [5, 1], 0), ([2, 1], [5, 5], 2)),
        "more chunks than rows": chunks(0, *[0, 1, 2] * 4),
        "grid": GridShardingSpec((0, 1), [places(0, 1), places(2, 0)]),
    },
    4: ALL,
}


def save_every_layout(path: str) -> None:
    """One tensor in each layout that the tests know, and a plain one."""
    tensors = {name: shard_tensor(PLAIN + number, spec) for number, (name, spec) in enumerate(ALL.items())}
    shardwise.save({"sharded": tensors, "plain": PLAIN * 2}, path)


def load_every_layout(path: str) -> None:
    """Each of them into each layout of this many ranks, and into a plain tensor; the plain one into each layout."""
    for spec in TARGETS[dist.get_world_size()].values():
        targets = {name: zeros(spec, SIZE) for name in ALL}
        state = shardwise.load({"sharded": targets, "plain": zeros(spec, SIZE)}, path)
        for number, name in enumerate(ALL):
            assert holds(targets[name], PLAIN + number), name
        assert holds(state["plain"], PLAIN * 2)
    plain = {name: torch.zeros(SIZE) for name in ALL}
    shardwise.load({"sharded": plain, "plain": torch.zeros(SIZE)}, path)
    for number, name in enumerate(ALL):
        assert torch.equal(plain[name], PLAIN + number)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_any_layout_loads_into_any_other_on_any_number_of_ranks(tmp_path: Path, world_size: int) -> None:
    """Even, uneven, several per rank, with empty boxes, replicated, on a grid, on some of the ranks, and plain."""
    run_on_ranks(4, save_every_layout, str(tmp_path / "checkpoint"))
    run_on_ranks(world_size, load_every_layout, str(tmp_path / "checkpoint"))


def test_a_process_alone_reads_what_ranks_have_saved(tmp_path: Path) -> None:
    """Without torch.distributed; and what it saves, ranks can read."""
    run_on_ranks(4, save_every_layout, str(tmp_path / "four"))
    plain = {name: torch.zeros(SIZE) for name in ALL}
    state = {"sharded": plain, "plain": torch.zeros(SIZE)}
    assert shardwise.load(state, tmp_path / "four") is state
    for number, name in enumerate(ALL):
        assert torch.equal(plain[name], PLAIN + number)
    shardwise.save(state, tmp_path / "one")
    run_on_ranks(3, load_every_layout, str(tmp_path / "one"))


DTYPES = [  # all that torch can copy
    dtype
    for dtype in dict.fromkeys(value for value in vars(torch).values() if isinstance(value, torch.dtype))
    if not re.match(r"torch\.(q|bits|float4|u?int[1-7]$)", str(dtype))
]


def some_bytes(dtype: torch.dtype, *size: int) -> torch.Tensor:
    """Values of any dtype; those of bool are 0 and 1."""
    raw = (
        torch.arange(torch.Size(size).numel() * dtype.itemsize, dtype=torch.int64)
        * 37
        % (2 if dtype == torch.bool else 251)
    )
    return raw.to(torch.uint8).view(dtype).reshape(size)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@ranks(4)
def test_every_dtype(tmp_path: Path) -> None:
    """Sharded and plain, bit by bit; also those that safetensors has no word for."""
    assert {torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.complex128, torch.uint64} <= set(DTYPES)
    before = {str(dtype): some_bytes(dtype, 7, 6) for dtype in DTYPES}
    state = {name: [shard_tensor(plain, ALL["uneven, several per rank"]), plain] for name, plain in before.items()}
    shardwise.save(state, tmp_path / "checkpoint")
    targets = {
        str(dtype): [empty(chunks(1, 0, 1, 2), SIZE, dtype=dtype), torch.empty(SIZE, dtype=dtype)] for dtype in DTYPES
    }
    shardwise.load(targets, tmp_path / "checkpoint")
    for name, (sharded, plain) in targets.items():
        assert holds(sharded, before[name]), name
        assert torch.equal(plain.view(torch.uint8), before[name].view(torch.uint8)), name


def odd_tensors() -> dict[str, torch.Tensor]:
    """No dims, no elements, strides, lazy conjugation and negation, zeros without memory, leaves, expanded."""
    base = torch.arange(24.0).reshape(4, 6)
    values = torch.complex(base, base + 1)
    return {
        "scalar": torch.tensor(3.5),
        "nothing": torch.empty(0, 5),
        "transposed": base.t(),
        "every other": base[::2, 1::2],
        "conjugate": values.conj(),
        "negative": values.conj().imag,
        "zeros": torch._efficientzerotensor((4, 6)),
        "leaf": base.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(base + 2),
        "of a graph": (base.clone().requires_grad_() * 2),
        "expanded": torch.ones(1, 3).expand(5, 3),
        "one element, odd strides": torch.arange(4.0).as_strided((1, 1), (3, 2)),
    }


@ranks(3)
def test_odd_tensors(tmp_path: Path) -> None:
    """Whatever their memory looks like, their values are saved; and loaded into memory of the same kind."""
    shardwise.save(odd_tensors(), tmp_path / "checkpoint")
    targets = {name: torch.zeros_like(tensor) for name, tensor in odd_tensors().items()}
    state = {"replicated": ReplicatedTensor(torch.arange(4.0)), "name": "\udc80", "\udc80": 1}
    shardwise.save(state, tmp_path / "more")
    loaded = shardwise.load({"replicated": torch.zeros(4), "name": "", "\udc80": 0}, tmp_path / "more")
    assert torch.equal(loaded["replicated"], torch.arange(4.0))
    assert (loaded["name"], loaded["\udc80"]) == ("\udc80", 1)
    targets["transposed"] = torch.zeros(4, 6).t()
    targets["every other"] = torch.zeros(8, 9)[::4, ::3]
    targets["conjugate"] = torch.zeros(4, 6, dtype=torch.complex64).conj()
    targets["leaf"] = torch.zeros(4, 6, requires_grad=True)
    shardwise.load(targets, tmp_path / "checkpoint")
    for name, tensor in odd_tensors().items():
        assert torch.equal(targets[name], tensor), name
    assert targets["leaf"].is_leaf
    assert targets["leaf"].requires_grad


@ranks(4)
def test_sub_groups(tmp_path: Path) -> None:
    """A tensor on two of four ranks, saved by all of them, or by these two alone."""
    group = dist.new_group([1, 3])
    tensor = zeros(chunks(0, 3, 1), SIZE, process_group=group)
    for shard in tensor.local_shards():
        first, rows = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
        shard.tensor.copy_(PLAIN[first : first + rows])
    shardwise.save([tensor], tmp_path / "all")
    target = zeros(ALL["grid"], SIZE)
    shardwise.load([target], tmp_path / "all")
    assert holds(target, PLAIN)
    if dist.get_rank() in (1, 3):
        shardwise.save([tensor], tmp_path / "two", process_group=group)
        again = zeros(chunks(1, 1, 3), SIZE, process_group=group)
        shardwise.load([again], tmp_path / "two", process_group=group)
        assert holds(again, PLAIN)
    else:
        with pytest.raises(RuntimeError, match="not in the given group"):
            shardwise.save([tensor], tmp_path / "two", process_group=group)
    dist.barrier()
    assert sorted(read_index(tmp_path / "two").files) == [file_of(tmp_path / "two", rank).name for rank in (1, 3)]


@ranks(4)
def test_each_rank_writes_about_as_much(tmp_path: Path) -> None:
    """Plain and replicated tensors are shared out, the large ones cut; what only one rank has, it writes."""
    state = {
        "large": torch.rand(2048, 2048),
        "replicated": zeros(ReplicatedShardingSpec(places(0, 2, 3)), 1000, 1000),
        "small": [torch.rand(1000) for _ in range(50)],
        "on one": zeros(chunks(0, 1), 500, 1000),
    }
    shardwise.save(state, tmp_path / "checkpoint")
    sizes = read_index(tmp_path / "checkpoint").files.values()
    total = 4 * (2048 * 2048 + 1000 * 1000 + 50 * 1000 + 500 * 1000)
    assert len(sizes) == 4
    assert total < sum(sizes) < total + 4 * 10_000
    assert max(sizes) < 1.1 * total / 4


@ranks(4)
def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    """Also sharded ones on a rank that holds nothing of them, and the detached ones of a module's state dict."""
    plain = torch.rand(5, 5)
    sharded = shard_tensor(PLAIN, chunks(0, 0, 2))
    model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(6, 7), "head": torch.nn.Linear(6, 7, bias=False)})
    model["embedding"].weight = model["head"].weight = torch.nn.Parameter(sharded)
    state: dict[str, Any] = {"a": plain, "b": [plain], "c": plain[:3], "model": model, "again": sharded}
    shardwise.save(state, tmp_path / "checkpoint")
    index = read_index(tmp_path / "checkpoint")
    assert sorted(index.tensors) == ["a", "c", "model/embedding.weight"]
    assert index.state["b"][0] is index.state["a"]
    assert index.state["again"] is index.state["model"]["head.weight"]
    target: dict[str, Any] = {
        "a": torch.zeros(5, 5),
        "b": [torch.zeros(5, 5)],
        "c": torch.zeros(3, 5),
        "model": model,
        "again": sharded,
    }
    sharded.zero_()
    shardwise.load(target, tmp_path / "checkpoint")
    assert torch.equal(target["b"][0], plain)
    assert holds(sharded, PLAIN)


@ranks(2)
def test_tensors_are_tied_only_if_all_ranks_say_so(tmp_path: Path) -> None:
    """Else what some hold apart would be lost."""
    sharded = shard_tensor(PLAIN, chunks(0, 0, 1))
    other = shard_tensor(PLAIN, chunks(0, 0, 1))
    if dist.get_rank() == 0:
        other.local_shards()[0].tensor = sharded.local_tensor()
    else:
        other.local_tensor().zero_()
    shardwise.save({"a": sharded, "b": other}, tmp_path / "checkpoint")
    assert list(read_index(tmp_path / "checkpoint").tensors) == ["a", "b"]


@ranks(2)
def test_the_files_are_safetensors(tmp_path: Path) -> None:
    """Any reader of that format opens them: a shard under its name and box, a whole tensor under its name."""
    weight = shard_tensor(PLAIN, chunks(0, 0, 1))
    state = {"weight": weight, "bias": torch.arange(3.0).to(torch.bfloat16), "phase": torch.tensor([1j])}
    shardwise.save({"model": state}, tmp_path / "checkpoint")
    found: dict[str, torch.Tensor] = {}
    for rank in range(2):
        with safe_open(file_of(tmp_path / "checkpoint", rank), "pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no dict
    assert torch.equal(found["model/weight[0:4, 0:6]"], PLAIN[:4])
    assert torch.equal(found["model/weight[4:7, 0:6]"], PLAIN[4:])
    assert torch.equal(found["model/bias"], state["bias"])
    assert torch.equal(found["model/phase"].view(torch.complex64).reshape(1), torch.tensor([1j]))


@ranks(2)
def test_gradients_see_that_values_have_changed(tmp_path: Path) -> None:
    """A graph that saved a tensor before a load does not go backward with the loaded values."""
    weight = shard_tensor(PLAIN, chunks(0, 0, 1)).requires_grad_()
    shardwise.save({"weight": weight}, tmp_path / "checkpoint")
    loss = (weight.local_tensor() ** 2).sum()
    shardwise.load({"weight": weight}, tmp_path / "checkpoint")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
