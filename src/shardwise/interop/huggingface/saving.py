"""`save_pretrained`: the folder that transformers loads, written by all ranks, without the model being anywhere."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from shardwise.checkpoint.archive.memory import tensor_bytes
from shardwise.checkpoint.archive.state_tree import NodeKind
from shardwise.checkpoint.local import Local
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.snapshot import agree_on_state
from shardwise.comm.group import Fields
from shardwise.comm.transfer import make_plan, move
from shardwise.comm.transfer.views import view_of
from shardwise.errors import CheckpointError
from shardwise.interop.huggingface.files import FolderAssignment, Reordering, WeightFiles
from shardwise.interop.huggingface.folder import Folder
from shardwise.interop.huggingface.names import stored_tensors

Parts = dict[str, list[tuple[int, Iterable[memoryview]]]]  # by file: positions, and the bytes to write there


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "50GB",
    state_dict: Mapping[str, torch.Tensor] | None = None,
    process_group: ProcessGroup | None = None,
) -> None:
    """Write a model as transformers does: ``model.safetensors``, or several files and an index, and its configuration.

    Every rank of the group (by default of the default group; a process alone needs none) calls it, with a folder on a
    file system that all share. Nobody ever holds the model: each rank writes the boxes that it has into the common
    files. Tensors whose boxes are not stretches of the file are first moved, 16 MiB a rank at a time. Tied weights are
    written once. ``from_pretrained`` reads the folder, on any machine.

    Other files in the folder stay. If any rank fails, older weights stay too, and every rank raises the same error.

    >>> import tempfile, torch, shardwise
    >>> from safetensors.torch import load_file
    >>> folder = tempfile.mkdtemp()
    >>> shardwise.huggingface.save_pretrained(torch.nn.Linear(2, 3), folder)
    >>> sorted(load_file(f"{folder}/model.safetensors"))
    ['bias', 'weight']
    """
    saving = _PretrainedFolder(model, Folder(folder), Ranks.of(process_group, "save_pretrained"))
    try:
        saving.agree(state_dict, max_shard_size)
        saving.write()
        saving.commit()
    except BaseException:
        saving.discard()
        raise


class _PretrainedFolder:
    """The steps of a save, which all ranks take together."""

    def __init__(self, model: nn.Module, folder: Folder, ranks: Ranks) -> None:
        self._model, self._folder, self._ranks = model, folder, ranks
        self._files: WeightFiles
        self._locals: list[Local]

    def agree(self, given: Mapping[str, torch.Tensor] | None, max_shard_size: int | str) -> None:
        """Check that all ranks have the same state, and make the files."""
        model = self._model
        state, _ = self._ranks.in_step(lambda: (stored_tensors(model) if given is None else dict(given), {}, None))
        snapshot, first, _ = agree_on_state(state, self._ranks, lambda: None)

        def begin() -> tuple[WeightFiles, Fields, None]:
            for path, node in snapshot.tree.walk():
                if path and node.kind is not NodeKind.TENSOR:
                    raise CheckpointError(f"'{path[0]}' of the state is no tensor: a Hugging Face folder has no other")
            files = WeightFiles.of(list(sources.values()), max_shard_size)
            if self._ranks.first:
                self._folder.begin({file.name: (file.header, file.size) for file in files.files})
            return files, {"verb": "save_pretrained", "max_shard_size": max_shard_size}, None

        sources = snapshot.sources(first)
        self._locals = [snapshot.locals[number] for number in sources]
        self._files, _ = self._ranks.in_step(begin)

    def write(self) -> None:
        """Write the boxes that are contiguous in a file; then move the others into file order, and write those."""
        assignment = FolderAssignment.of(self._files.sources, self._ranks.all)
        self._ranks.together(lambda: self._write(self._in_file_order(assignment)))
        for one in assignment.reorderings:
            moved = self._moved(one)
            self._ranks.together(partial(self._write_reordered, one, moved))

    def _in_file_order(self, assignment: FolderAssignment) -> Parts:
        parts: Parts = {}
        for part in assignment.direct[self._ranks.here]:
            local = self._locals[part.source]
            name, position = self._files.place(part.source, part.offsets)
            box = local.view(part.row, part.offsets, part.sizes)
            parts.setdefault(name, []).append((position, tensor_bytes(box)))
        return parts

    def _moved(self, one: Reordering) -> list[torch.Tensor]:
        local = self._locals[one.source]
        plan, tensors = make_plan(local.layout, one.layout), list(local.tensors.values())
        if self._ranks.group is None:
            whole = _whole_tensor(local)
            return [whole[one.layout.boxes.index(row)] for row in range(len(one.layout))]
        return move(plan, tensors, self._ranks.group, dtype=local.dtype).wait()

    def _write_reordered(self, one: Reordering, moved: list[torch.Tensor]) -> None:
        parts: Parts = {}
        for row, tensor in zip(one.layout.rows_on(self._ranks.here), moved, strict=True):
            name, position = self._files.place(one.source, one.layout.boxes.offsets[row].tolist())
            parts.setdefault(name, []).append((position, tensor_bytes(tensor)))
        self._write(parts)

    def _write(self, parts: Parts) -> None:
        for name, found in parts.items():
            self._folder.write(name, found)

    def commit(self) -> None:
        """Write the configuration and give all files their names. Called when all ranks have written."""

        def work() -> None:
            if self._ranks.first:
                _write_configuration(self._model, self._folder)
                self._folder.commit(self._files.index)

        self._ranks.together(work)

    def discard(self) -> None:
        """Remove the files of this save."""
        self._folder.discard()


def _whole_tensor(local: Local) -> torch.Tensor:
    """The whole tensor, all of whose shards are in this process."""
    whole = torch.empty(local.layout.size, dtype=local.dtype)
    for number, tensor in local.tensors.items():
        box = local.layout.boxes.offsets[number].tolist(), local.layout.boxes.sizes[number].tolist()
        view_of(whole, *box).copy_(tensor)
    return whole


def _write_configuration(model: Any, folder: Folder) -> None:
    """The files beside the weights, for a model that has them."""
    if callable(getattr(getattr(model, "config", None), "save_pretrained", None)):
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.dtype = str(next(p.dtype for p in model.parameters() if p.is_floating_point())).removeprefix("torch.")
        config.save_pretrained(folder.draft)
    if callable(getattr(model, "can_generate", None)) and model.can_generate():
        model.generation_config.save_pretrained(folder.draft)
