"""A configuration of transformers, and the model that it describes: its class, and itself without weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.archive.formats.assembly import parse_json
from shardwise.checkpoint.storage import Storage, storage_at
from shardwise.checkpoint.storage.protocol import read_file
from shardwise.errors import CheckpointError

CONFIG = "config.json"
MOST_BYTES = 2**26  # of a file of JSON


def read_config(storage: Storage, name: str = CONFIG) -> Any:
    """The configuration of a folder. Nothing of the folder is executed."""
    from transformers import CONFIG_MAPPING

    if name not in storage.names():
        raise CheckpointError(
            f"'{storage}' is no folder of transformers: there is no '{name}' in it. Models are read from folders; "
            "huggingface_hub.snapshot_download gives the folder of a model's name"
        )
    words = parse_json(read_file(storage, name, most=MOST_BYTES), f"'{name}' of '{storage}'")
    if words.get("model_type") is None:
        raise CheckpointError(
            f"'{name}' of '{storage}' has no model_type, by which transformers knows the model, such as \"llama\""
        )
    kind = str(words["model_type"])
    if kind not in CONFIG_MAPPING:
        raise CheckpointError(f"'{name}' of '{storage}' is of model_type {kind!r:.50}, unknown to transformers")
    with _named(f"'{name}' of '{storage}' is no configuration of a '{kind}'"):
        return CONFIG_MAPPING[kind].from_dict(words)


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Within this context, whatever transformers raises becomes an error that says what failed, and the cause."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # each version of transformers has other ones
        cause = error.__cause__ or error  # huggingface_hub wraps what is wrong
        why = " ".join(str(cause).split()).rstrip(".")
        raise CheckpointError(f"{what}: {why:.300} ({type(cause).__name__})") from error


def class_of(config: Any, storage: Storage, *, otherwise: str = "give model_class") -> Any:
    """The class that a configuration names; ``otherwise`` says what to do where it names none."""
    import transformers

    named = next(iter(getattr(config, "architectures", None) or ()), None)
    found = getattr(transformers, named, None) if isinstance(named, str) else None
    if found is None:
        raise CheckpointError(
            f"the configuration of '{storage}' names no class of transformers ({named!r:.50}): {otherwise}"
        )
    return found


def safe_on_meta() -> Any:
    """A context in which models read numbers of tensors that they make, although they are made on meta."""
    from transformers import initialization

    return getattr(initialization, "meta_device_safe_creation_ops", nullcontext)()


def model_of_config(path: str | os.PathLike[str], dtype: torch.dtype | None = None) -> nn.Module:
    """The model of a folder, or of a configuration file, on ``meta`` and ready to be trained; no weights are needed.

    The dtype is by default that of the configuration, or float32 where that has none.
    """
    is_file = Path(path).is_file()
    folder, name = (Path(path).parent, Path(path).name) if is_file else (path, CONFIG)
    storage = storage_at(folder)
    config = read_config(storage, name)
    made_by = class_of(config, storage, otherwise='"architectures" of it should, such as ["LlamaForCausalLM"]')
    config.use_cache = False  # which training has no use for
    failed = f"transformers makes no {made_by.__name__} of '{name}' of '{storage}'"
    with _named(failed), torch.device("meta"), safe_on_meta():
        model: nn.Module = made_by._from_config(config, dtype=dtype or getattr(config, "dtype", None) or torch.float32)
    return model.train()
