"""`load_pretrained`: loads a Hugging Face folder into a sharded model; each rank reads its own boxes."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from shardwise.checkpoint.archive import Archive, Index, StoredTensor
from shardwise.checkpoint.archive.formats import safetensors_folder, torch_save
from shardwise.checkpoint.filling import Filling
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.storage import Storage, storage_at
from shardwise.comm.group import Fields
from shardwise.errors import StateMismatchError
from shardwise.interop.huggingface.names import require_views, stored_tensors
from shardwise.nn.buffers import buffers_without_data, fill_buffers, require_data
from shardwise.nn.plain_tensors import make_plain_memory, shard_device

MOST_LISTED = 10


def load_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str] | Storage,
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
    ranks = Ranks.of(process_group, "load_pretrained")

    def find() -> tuple[Archive, Fields, None]:
        storage = storage_at(folder)
        archive = Archive(storage, weights_index(storage))
        there = _by_names_of(model, archive.index.tensors)
        _require_fit(archive, there, stored_tensors(model), _ignored_names(model), strict=strict)
        return archive, {"verb": "load_pretrained", "names": sorted(archive.index.tensors)}, None

    archive, _ = ranks.in_step(find)
    with archive:
        make_plain_memory(model, shard_device(model) or torch.device("cpu"))
        if buffers_without_data(model) and hasattr(model, "config"):
            fill_buffers(model, lambda: type(model)(copy.deepcopy(model.config)), process_group=process_group)
        require_data(model)
        hosts = ranks.hosts()
        filling, _ = ranks.in_step(lambda: _filling(archive, model, ranks, hosts))
        filling.fill()


def weights_index(storage: Storage) -> Index:
    """The index of a folder's weights: its safetensors files, else those of `torch.save`."""
    names = storage.names()
    if torch_save.is_here(names) and not safetensors_folder.is_here(names):
        return torch_save.build_folder_index(storage)
    return safetensors_folder.build_index(storage)


def _ignored_names(model: nn.Module) -> re.Pattern[str] | None:
    """Names that older folders have and the model does not need, by its own account."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None)
    return re.compile("|".join(patterns)) if patterns else None


def _by_names_of(model: nn.Module, there: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """The tensors of a folder under the names that the model has for them.

    A folder of a model with a head has a prefix before names that the model without a head has not; so has the model
    with a head, beside a folder of one without. Heads that the model does not have are left out.
    """
    prefix = getattr(model, "base_model_prefix", "")
    if not prefix:
        return there
    begins, renamed = f"{prefix}.", there
    if not hasattr(model, prefix):
        renamed = {name.removeprefix(begins): one for name, one in there.items() if name.startswith(begins)}
    elif not any(name.startswith(begins) for name in there):
        renamed = {begins + name: one for name, one in there.items()}
    return renamed if renamed.keys() & stored_tensors(model).keys() else there


def _require_fit(
    archive: Archive,
    there: Mapping[str, StoredTensor],
    wanted: Mapping[str, Any],
    ignored: re.Pattern[str] | None,
    *,
    strict: bool,
) -> None:
    """Raise one error that lists all differences."""
    known = {id(wanted[name]) for name in there if name in wanted}  # a folder has only one name of a tied tensor
    missing = [name for name, tensor in wanted.items() if name not in there and id(tensor) not in known]
    unexpected = [name for name in there if name not in wanted and not (ignored and ignored.search(name))]
    lines = _line("missing in the folder", missing) + _line("not in the model", unexpected) if strict else []
    different = [
        f"'{name}' is of size {tuple(wanted[name].shape)} in the model and {tuple(stored.size)} in the folder"
        for name, stored in there.items()
        if name in wanted and wanted[name].shape != stored.size
    ]
    lines += _line("different", different)
    if lines:
        more = ["  (load_pretrained with strict=False loads the names that both have)"] if not different else []
        raise StateMismatchError(
            "\n".join([f"'{archive.storage}' does not hold this model; nothing was loaded", *lines, *more])
        )


def _filling(archive: Archive, model: nn.Module, ranks: Ranks, hosts: int) -> tuple[Filling, Fields, None]:
    wanted = stored_tensors(model)
    require_views(wanted, model)
    there = _by_names_of(model, archive.index.tensors)
    pairs = [(name, tensor, there[name]) for name, tensor in wanted.items() if name in there]
    filling = Filling.of(archive, pairs, ranks, hosts, verify=True)
    return filling, {"what is read once for all": filling.relays}, None


def _line(what: str, names: list[str]) -> list[str]:
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return [f"  {what}: {', '.join(names[:MOST_LISTED])}{more}"] if names else []
