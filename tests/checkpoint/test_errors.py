"""Wrong on purpose: every rank raises the same clear error, nothing is loaded in part, nothing is left behind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, PLAIN, SIZE, chunks, holds
from tests.checkpoint.files import edit, file_of

import shardwise
from shardwise import empty, zeros
from shardwise.checkpoint import LocalStorage, Storage, read_index
from shardwise.checkpoint.archive.index_file import INDEX
from shardwise.checkpoint.storage import local
from shardwise.errors import CheckpointError, RankMismatchError, StateMismatchError
from shardwise.tensor import shard_tensor
from shardwise.tensor.partial import PartialTensor
from shardwise.testing import ranks


def saved(path: Path) -> Path:
    """A checkpoint of one sharded and one plain tensor and a value."""
    shardwise.save({"weight": shard_tensor(PLAIN, ALL["chunk dim 0"]), "bias": torch.arange(5.0), "step": 3}, path)
    return path


def target() -> dict[str, Any]:
    """What it can be loaded into."""
    return {"weight": zeros(ALL["uneven grid"], SIZE), "bias": torch.zeros(5), "step": 0}


def untouched(state: dict[str, Any]) -> bool:
    """Whether nothing was loaded into it."""
    return holds(state["weight"], torch.zeros(SIZE)) and not state["bias"].any() and state["step"] == 0


def on_rank_0(change: Any, *args: Any) -> None:
    """Change files while the other ranks wait."""
    if dist.get_rank() == 0:
        change(*args)
    dist.barrier()


def cut_off(file: Path) -> None:
    """The last byte is gone."""
    os.truncate(file, file.stat().st_size - 1)


def garble_header(file: Path) -> None:
    """As long as before."""
    data = bytearray(file.read_bytes())
    data[8:40] = b"\xff" * 32
    file.write_bytes(data)


def swap(file: Path) -> None:
    """Put the file of another checkpoint, of the same size, in the place of this one."""
    words = file.read_bytes()
    at = words.index(b'"shardwise":"') + len(b'"shardwise":"')
    file.write_bytes(words[:at] + b"0" * 16 + words[at + 16 :])


def of_rank_2(change: Any) -> Any:
    """Do it to the file that rank 2 has written."""
    return lambda folder: change(file_of(folder, 2))


def of_index(change: Any) -> Any:
    """Do it to the index."""
    return lambda folder: change(folder / INDEX)


def saying(*keys: str | int, value: Any) -> Any:
    """Let the index say something else."""
    return lambda folder: edit(folder, *keys, value=value)


def flip(file: Path) -> None:
    """One bit of the first tensor."""
    data = bytearray(file.read_bytes())
    data[8 + int.from_bytes(data[:8], "little") + 2] ^= 16
    file.write_bytes(data)


FILE = r"rank-00002\.[0-9a-f]{16}\.safetensors"
GAP = [[0, 0, 2, 6], [2, 0, 2, 6], [4, 0, 2, 6], [6, 0, 1, 5]]
DAMAGES: dict[str, tuple[Any, str]] = {
    "a file is cut off": (of_rank_2(cut_off), f"its file '{FILE}' is cut off or changed"),
    "a file is missing": (
        of_rank_2(os.remove),
        rf"could not open .*{FILE}': No such file|its file '{FILE}' is missing",
    ),
    "a header is garbled": (of_rank_2(garble_header), f"'{FILE}' is not a safetensors file"),
    "a file is of another checkpoint": (of_rank_2(swap), f"file '{FILE}' does not belong to this checkpoint"),
    "an empty file": (of_rank_2(lambda file: os.truncate(file, 0)), "cut off or changed, it has 0 bytes"),
    "the index is missing": (of_index(os.remove), "half a checkpoint: it has no 'index.json'"),
    "the index is cut off": (of_index(cut_off), "is damaged: its 'index.json' is not JSON"),
    "the index is empty": (of_index(lambda file: os.truncate(file, 0)), "is not JSON"),
    "the index is garbage": (of_index(lambda file: file.write_bytes(b"\xff\xfe")), "is not JSON"),
    "the index is a list": (of_index(lambda file: file.write_text("[]")), "not a checkpoint of shardwise"),
    "another format": (saying("format", value="else"), "not a checkpoint of shardwise"),
    "a later version": (saying("version", value=3), "version 3, .* reads version 2"),
    "no tensors": (saying("tensors", value=None), "is lacking or garbled"),
    "a gap": (
        saying("tensors", "weight", value={"dtype": "float32", "size": [7, 6], "on": 0, "boxes": GAP}),
        "says of tensor 'weight' what cannot be",
    ),
    "a file elsewhere": (saying("files", 0, value=["../x.safetensors", 1, "00"]), "no name of a file"),
    "an unknown dtype": (saying("tensors", "bias", "dtype", value="float7"), "'float7'"),
    "another dtype": (saying("tensors", "weight", "dtype", value="int32"), "'weight' is"),
    "a negative size": (saying("files", 0, 1, value=-1), "has -1 bytes"),
    "a value that is none": (saying("state", value={"set": []}), "stands for no value"),
}


@ranks(4)
def test_a_damaged_checkpoint_is_not_loaded_in_part(tmp_path: Path) -> None:
    """Every rank raises the same, also those that need nothing of what is damaged, and every target is as before."""
    whole = saved(tmp_path / "whole")
    for number, (damage, (change, fragment)) in enumerate(DAMAGES.items()):
        path = tmp_path / str(number)
        on_rank_0(shutil.copytree, whole, path)
        on_rank_0(change, path)
        state = target()
        with pytest.raises(CheckpointError, match=fragment) as error:
            shardwise.load(state, path)
        assert untouched(state), damage
        told: list[Any] = [None] * 4
        dist.all_gather_object(told, str(error.value))
        assert len(set(told)) == 1, damage
        with pytest.raises(CheckpointError, match=fragment if damage != "another dtype" else "should hold 'weight"):
            shardwise.verify(path)


@ranks(4)
def test_a_bit_that_is_not_what_was_written(tmp_path: Path) -> None:
    """Is told with tensor, box and file on every rank, and values are untouched; verify finds it without a model."""
    path = saved(tmp_path / "checkpoint")
    on_rank_0(of_rank_2(flip), path)
    told = rf"\[4:6, 0:6\] of tensor 'weight' in file '{FILE}' is not what was written"
    state = target()
    with pytest.raises(CheckpointError, match=told):
        shardwise.load(state, path)
    assert state["step"] == 0
    with pytest.raises(CheckpointError, match=told):
        shardwise.verify(path)
    shardwise.load(state, path, verify=False)
    assert state["step"] == 3


@ranks(2)
def test_a_foreign_or_missing_directory(tmp_path: Path) -> None:
    """Is said to be one, and not read; a foreign index is not replaced."""
    on_rank_0((tmp_path / "notes.txt").write_text, "mine")
    with pytest.raises(CheckpointError, match=r"it holds notes.txt"):
        shardwise.load({"bias": torch.zeros(5)}, tmp_path)
    on_rank_0((tmp_path / "index.json").write_text, '{"weight_map": {}}')
    with pytest.raises(CheckpointError, match=r"is not replaced by a new checkpoint, for its 'index.json'"):
        shardwise.save({"bias": torch.zeros(5)}, tmp_path)
    on_rank_0(os.remove, tmp_path / "index.json")
    with pytest.raises(CheckpointError, match="nothing is there"):
        shardwise.load({"bias": torch.zeros(5)}, tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"could not make .*notes.txt': File exists"):
        shardwise.save({"bias": torch.zeros(5)}, tmp_path / "notes.txt")
    assert os.listdir(tmp_path) == ["notes.txt"]


@ranks(4)
def test_all_differences_are_told_at_once(tmp_path: Path) -> None:
    """Names, sizes, dtypes and kinds, before anything is changed; with strict=False, names do not matter."""
    path = tmp_path / "checkpoint"
    shardwise.save({"a": {"x": PLAIN, "y": 1}, "b": PLAIN, "c": PLAIN, "d": [PLAIN, 2], "e": PLAIN, "s": 5}, path)
    state: dict[str, Any] = {
        "a": {"x": torch.zeros(SIZE), "z": torch.zeros(2)},
        "b": zeros(chunks(0, 0, 1), 6, 7),
        "c": torch.zeros(SIZE, dtype=torch.float64),
        "d": [torch.zeros(SIZE)],
        "e": None,
        "s": 0,
    }
    with pytest.raises(StateMismatchError) as error:
        shardwise.load(state, path)
    for fragment in (
        "missing in the checkpoint: a/z\n",
        "not in the state: a/y\n",
        "'b' is of size (6, 7) in the state and (7, 6) in the checkpoint",
        "'c' is torch.float64 in the state and torch.float32 in the checkpoint",
        "'d' is a list of 1 in the state and a list of 2 in the checkpoint",
        "'e' is the value None in the state and a tensor of size (7, 6), torch.float32 in the checkpoint",
    ):
        assert fragment in str(error.value)
    assert not state["a"]["x"].any()
    assert state["s"] == 0
    with pytest.raises(StateMismatchError, match=r"nothing was loaded\n  different: 'b'"):
        shardwise.load(state, path, strict=False)
    fits: dict[str, Any] = {"a": {"x": torch.zeros(SIZE), "z": torch.ones(2)}, "new": 9, "s": 0}
    shardwise.load(fits, path, strict=False)
    assert torch.equal(fits["a"]["x"], PLAIN)
    assert (fits["new"], fits["s"]) == (9, 5)
    assert torch.equal(fits["a"]["z"], torch.ones(2))


DIFFERENT: dict[str, tuple[Any, str]] = {
    "names": (lambda rank: {("a", "b")[rank == 2]: 1}, "'a'=nothing on rank:2"),
    "values": (lambda rank: {"a": 1 + (rank == 2)}, "'a'=int 1 on rank:0 .* 'a'=int 2 on rank:2"),
    "types": (lambda rank: {"a": (1, 1.0)[rank == 2]}, "'a'=int 1 on rank:0 .* 'a'=float 1.0 on rank:2"),
    "sizes": (lambda rank: [torch.zeros(3 + (rank == 2))], r"size \(3,\), plain on rank:0 .* size \(4,\)"),
    "layouts": (
        lambda rank: empty(chunks(0, 0, 1), 4) if rank < 2 else empty(chunks(0, 1, 0), 4),
        "'state'=.* on rank:2",
    ),
    "nesting": (lambda rank: {"a": ([1], (1,))[rank == 2]}, r"'a' \(as a whole\)=a tuple of \[0\] on rank:2"),
    "a bad leaf": (lambda rank: {"a": 1 if rank != 2 else {3}}, "'a' is a builtins.set.*\n.*found on rank 2"),
}


@pytest.mark.parametrize("what", DIFFERENT)
@ranks(4)
def test_ranks_with_different_states(tmp_path: Path, what: str) -> None:
    """Every rank is told who differs in what, and nothing is left behind."""
    make, fragment = DIFFERENT[what]
    with shardwise.validation(False):
        state = make(dist.get_rank())
    kind = CheckpointError if what == "a bad leaf" else RankMismatchError
    with pytest.raises(kind, match=fragment):
        shardwise.save(state, tmp_path / "checkpoint")
    dist.barrier()
    assert os.listdir(tmp_path) == []


@ranks(2)
def test_tensors_that_are_neither_sharded_nor_plain_are_refused(tmp_path: Path) -> None:
    """With the way out."""
    with pytest.raises(CheckpointError, match=r"'p' is a PartialTensor.*redistribute\(spec\)"):
        shardwise.save({"p": PartialTensor(torch.ones(3))}, tmp_path / "checkpoint")
    assert os.listdir(tmp_path) == []


@ranks(4)
def test_a_tensor_on_ranks_that_do_not_save(tmp_path: Path) -> None:
    """Half of it would be lost."""
    tensor = zeros(chunks(0, 0, 1, 2, 3), SIZE)
    group = dist.new_group([0, 2])
    if dist.get_rank() in (0, 2):
        with pytest.raises(CheckpointError, match=r"\[2:4, 0:6\] of 'w' lies on rank:1/cpu, which does not take part"):
            shardwise.save({"w": tensor}, tmp_path / "checkpoint", process_group=group)
    dist.barrier()
    assert os.listdir(tmp_path) == []


def failing_on(monkeypatch: pytest.MonkeyPatch, rank: int, function: str, reason: str) -> None:
    """Let one function of the operating system fail on one rank."""
    if dist.get_rank() == rank:

        def fail(*args: Any) -> None:
            raise OSError(28, reason)

        monkeypatch.setattr(local.os, function, fail)


@pytest.mark.parametrize(("rank", "call"), [(2, "pwrite"), (1, "fsync"), (0, "replace")])
@ranks(4)
def test_a_rank_that_cannot_write(tmp_path: Path, rank: int, call: str) -> None:
    """Every rank raises, the older checkpoint is as it was, nothing else is there; and the next save works."""
    path = saved(tmp_path / "some" / "checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        failing_on(patch, rank, call, "No space left on device")
        with pytest.raises(CheckpointError, match=f"No space left on device\n.found on rank {rank}"):
            shardwise.save({"weight": torch.ones(1000), "other": shard_tensor(PLAIN, ALL["grid"])}, path)
    dist.barrier()
    assert os.listdir(tmp_path / "some") == ["checkpoint"]
    state = shardwise.load(target(), path)
    assert holds(state["weight"], PLAIN)
    state["step"] = 8
    shardwise.save(state, path)
    assert read_index(path).state["step"] == 8


@ranks(4)
def test_a_damaged_file_that_nobody_needs(tmp_path: Path) -> None:
    """Is told of all the same: a checkpoint is whole or it is not."""
    path = saved(tmp_path / "checkpoint")
    on_rank_0(of_rank_2(cut_off), path)
    with pytest.raises(CheckpointError, match="cut off or changed"):
        shardwise.load({"step": 0}, path, strict=False)


@ranks(4)
def test_a_first_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """Not even the directories above it."""
    with pytest.MonkeyPatch.context() as patch:
        failing_on(patch, 3, "pwrite", "No space left on device")
        with pytest.raises(CheckpointError, match="could not write"):
            saved(tmp_path / "new" / "checkpoint")
    dist.barrier()
    assert os.listdir(tmp_path) == []


@ranks(2)
def test_a_read_that_fails_in_the_middle(tmp_path: Path) -> None:
    """Is raised on every rank; values are not changed."""
    path = saved_small(tmp_path / "checkpoint")
    state = {"weight": zeros(chunks(1, 0, 1), SIZE), "step": 0}
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            real = os.preadv

            def fail(file: int, buffers: Any, offset: int) -> int:
                if offset > 8 and sum(buffer.nbytes for buffer in buffers) > 48:  # the header and the table are there
                    raise OSError(5, "Input/output error")
                return real(file, buffers, offset)

            patch.setattr(local.os, "preadv", fail)
        with pytest.raises(CheckpointError, match=r"Input/output error\n.found on rank 1"):
            shardwise.load(state, path)
    assert state["step"] == 0


def saved_small(path: Path) -> Path:
    """A checkpoint on two ranks."""
    shardwise.save({"weight": shard_tensor(PLAIN, chunks(0, 0, 1)), "step": 3}, path)
    return path


@ranks(2)
def test_ranks_that_do_not_share_a_file_system(tmp_path: Path) -> None:
    """Found out by the rank that does not see the directory, or by the first one, which does not see a file."""
    mine = tmp_path / str(dist.get_rank())
    mine.mkdir()
    state = {"weight": shard_tensor(PLAIN, chunks(0, 0, 1))}
    with pytest.raises(CheckpointError, match=r"one file system that they share\n.found on rank 1"):
        shardwise.save(state, mine / "checkpoint")
    if dist.get_rank() == 1:
        (mine / "checkpoint").mkdir()
    with pytest.raises(CheckpointError, match=r"a rank has written 'rank-00001\..*' .* does not see it"):
        shardwise.save(state, mine / "checkpoint")
    dist.barrier()
    assert os.listdir(tmp_path / "0") == []


@ranks(2)
def test_ranks_that_load_different_checkpoints(tmp_path: Path) -> None:
    """Are told so."""
    paths = [saved_small(tmp_path / name) for name in ("a", "b")]
    with pytest.raises(RankMismatchError, match=r"the ranks load different checkpoints: rank 0 found .* and rank 1"):
        shardwise.load({"weight": zeros(chunks(1, 0, 1), SIZE), "step": 0}, paths[dist.get_rank()])


def test_a_target_that_shares_memory_with_itself(tmp_path: Path) -> None:
    """Cannot hold what is loaded."""
    shardwise.save([torch.zeros(4, 3)], tmp_path)
    with pytest.raises(CheckpointError, match="'0' is expanded"):
        shardwise.load([torch.zeros(1, 3).expand(4, 3)], tmp_path)


def test_a_place_that_is_none() -> None:
    """Neither a path nor a storage."""
    with pytest.raises(CheckpointError, match="found int"):
        shardwise.save({}, 3)  # type: ignore[call-overload] # on purpose
    assert isinstance(LocalStorage("x"), Storage)


@pytest.mark.parametrize("where", ["first", "last", "strided"])
@ranks(4)
def test_a_plain_tensor_that_differs_between_ranks(tmp_path: Path, where: str) -> None:
    """A mixture of all would be written: every rank raises instead and says which, and the older one stays."""
    path = saved(tmp_path / "checkpoint")
    tensor = torch.zeros(3, 5).t() if where == "strided" else torch.zeros(5, 3)
    if dist.get_rank() == 2:
        tensor[(0, 0) if where == "first" else (4, 2)] = 1
    with pytest.raises(RankMismatchError, match=r"'inner/1' is a plain .* not the same on rank 2 as on rank 0"):
        shardwise.save({"inner": [torch.ones(3), tensor], "weight": zeros(ALL["uneven grid"], SIZE)}, path)
    dist.barrier()  # the first rank tidies up
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint"]
    state = target()
    shardwise.load(state, path)
    assert state["step"] == 3


@ranks(2)
def test_without_validation_plain_tensors_are_not_compared(tmp_path: Path) -> None:
    """Each rank then writes its share of what it has."""
    with shardwise.validation(False):
        shardwise.save({"own": torch.full((4,), float(dist.get_rank()))}, tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint" / INDEX).exists()
