"""`load_pretrained`: a Hugging Face folder into a model that is sharded already; each rank reads its own boxes."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup

from shardwise.api.buffers import fill_buffers, require_data, without_data
from shardwise.checkpoint.index import Piece, StoredTensor
from shardwise.checkpoint.loading import read_slabs, require_writable
from shardwise.checkpoint.local import Local
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.slabs import Slab, slabs_of
from shardwise.checkpoint.storage import LocalStorage
from shardwise.checkpoint.tensor_file import Header, read_header
from shardwise.errors import CheckpointError, StateMismatchError
from shardwise.huggingface.files import INDEX, ONE
from shardwise.huggingface.names import as_stored, require_views
from shardwise.process_group import Fields
from shardwise.sharded_tensor import ShardedTensorBase

MOST_LISTED = 10


def load_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    strict: bool = True,
    process_group: ProcessGroup | None = None,
) -> None:
    """Fill a model from a folder that transformers or `save_pretrained` wrote: each rank reads what it will hold.

    Every rank of the group (by default of the default group; a process alone needs none) calls it. Values are converted
    to the dtypes that the model has. The model may have been made on ``meta`` and then sharded::

        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        shard_module(model, plan)
        shardwise.huggingface.load_pretrained(model, folder)

    Plain tensors that are still on ``meta`` are made first, and buffers that no folder holds, such as those of rotary
    embeddings, are taken from a model that is made anew from the configuration. With ``strict=False``, names that only
    the model or only the folder has are left alone. All checks come before the first change, on every rank.
    """
    ranks = Ranks.of(process_group)

    def find() -> tuple[_Found, Fields, None]:
        found = _Found.of(folder)
        found.require(model, strict=strict)
        return found, {"verb": "load_pretrained", "names": sorted(found.stored)}, None

    def fill() -> tuple[None, Fields, None]:
        found.fill(model, ranks)
        return None, {}, None

    found, _ = ranks.in_step(find)
    _make_plain(model)
    if without_data(model) and hasattr(model, "config"):
        fill_buffers(model, lambda: type(model)(copy.deepcopy(model.config)), process_group=process_group)
    require_data(model)
    ranks.in_step(fill)


@dataclass(frozen=True, eq=False)
class _Found:
    """The tensors of a folder by name, and the headers of its files."""

    storage: LocalStorage
    stored: Mapping[str, StoredTensor]
    headers: Mapping[str, Header]

    @staticmethod
    def of(folder: str | os.PathLike[str]) -> _Found:
        storage = LocalStorage(folder)
        headers: dict[str, Header] = {}
        stored: dict[str, StoredTensor] = {}
        for file in _files(storage):
            with storage.reader(file) as read:
                headers[file] = read_header(read, file, storage.size(file), None)
            for name in headers[file].words:
                entry = headers[file].entry(name)
                piece = Piece((0,) * len(entry.sizes), entry.sizes, file, name)
                stored[name] = StoredTensor(name, entry.dtype, torch.Size(entry.sizes), (piece,))
        return _Found(storage, stored, headers)

    def require(self, model: nn.Module, *, strict: bool) -> None:
        """Raise one error with all that does not fit."""
        wanted = as_stored(model)
        known = {id(wanted[name]) for name in self.stored if name in wanted}  # a tied tensor has one of its names here
        missing = [name for name, tensor in wanted.items() if name not in self.stored and id(tensor) not in known]
        unexpected = [name for name in self.stored if name not in wanted]
        lines = _line("missing in the folder", missing) + _line("not in the model", unexpected) if strict else []
        different = [
            f"'{name}' is of size {tuple(wanted[name].shape)} in the model and {tuple(stored.size)} in the folder"
            for name, stored in self.stored.items()
            if name in wanted and wanted[name].shape != stored.size
        ]
        lines += _line("different", different)
        if lines:
            more = ["  (strict=False loads the names that both have)"] if not different else []
            raise StateMismatchError(
                "\n".join([f"'{self.storage}' does not hold this model; nothing was loaded", *lines, *more])
            )

    def fill(self, model: nn.Module, ranks: Ranks) -> None:
        """Read what is here of every tensor into its place."""
        by_file: dict[str, list[tuple[int, Slab]]] = {}
        tensors: list[torch.Tensor] = []
        wanted = as_stored(model)
        require_views(wanted, model)
        for name, tensor in wanted.items():
            if name not in self.stored:
                continue
            local = Local.of(name, tensor, ranks)
            require_writable(name, local)
            tensors += local.tensors.values()
            for slab in slabs_of(self.stored[name], local, ranks.here):
                position = self.headers[slab.piece.file].position(slab.piece.key, slab.entry)
                by_file.setdefault(slab.piece.file, []).append((position, slab))
        for file, slabs in by_file.items():
            with self.storage.reader(file) as read, torch.no_grad():
                read_slabs(slabs, read)
        increment_version([tensor for tensor in tensors if not tensor.is_inference()])


def _files(storage: LocalStorage) -> list[str]:
    names = storage.names()
    if INDEX in names:
        try:
            return sorted(set(json.loads(storage.read(INDEX))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(f"'{storage}' is damaged: its '{INDEX}' lacks or garbles {error!r}") from error
    if ONE not in names:
        there = f"it holds {', '.join(names[:5])}" if names else "nothing is there"
        raise CheckpointError(f"'{storage}' holds no weights: neither '{ONE}' nor '{INDEX}'; {there}")
    return [ONE]


def _line(what: str, names: list[str]) -> list[str]:
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return [f"  {what}: {', '.join(names[:MOST_LISTED])}{more}"] if names else []


def _make_plain(model: nn.Module) -> None:
    """Give memory to plain parameters and persistent buffers that are on meta, where the sharded parameters are."""
    sharded = [p for p in model.parameters() if isinstance(p, ShardedTensorBase) and not p.is_meta]
    device = sharded[0].device if sharded else torch.device("cpu")
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and not isinstance(parameter, ShardedTensorBase):
                new = made.get(id(parameter))
                if new is None:
                    new = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
                    vars(new).update(vars(parameter))
                    made[id(parameter)] = new
                module._parameters[name] = new
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and name not in module._non_persistent_buffers_set:
                module._buffers[name] = torch.empty_like(buffer, device=device)
