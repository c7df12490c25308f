"""The files beside the weights in a folder of Hugging Face: the configuration, and those of the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fnmatch import fnmatch

from shardwise.checkpoint.archive.stored import dtype_name
from shardwise.checkpoint.storage import Storage, storage_at
from shardwise.checkpoint.storage.protocol import read_file
from shardwise.errors import FileGoneError
from shardwise.tools.cli.contents import UsageError
from shardwise.tools.cli.rewriting import Rewriting

CONFIG = "config.json"
TOKENIZER = ("*token*.json", "*tokenizer.model", "vocab.*", "merges.txt", "chat_template.*")
BESIDE = (CONFIG, "generation_config.json", "*processor_config.json", *TOKENIZER)
DTYPE_KEYS = ("dtype", "torch_dtype")  # of transformers, and of its older versions


def model_files(config: str | None, source: str) -> tuple[Storage, list[str]] | None:
    """The folder that has the configuration of a model, and the files of it that belong beside the weights.

    It is the folder ``config``; without one, the source, if there is a configuration. None if there is none.
    """
    storage = storage_at(source if config is None else config)
    names = [name for name in _names(storage) if any(fnmatch(name, pattern) for pattern in BESIDE)]
    if CONFIG not in names:
        if config is not None:
            raise UsageError(f"--config '{config}' is no folder with a '{CONFIG}'")
        return None
    return storage, names


def _names(storage: Storage) -> list[str]:
    try:
        return storage.names()
    except (FileGoneError, NotADirectoryError):
        return []


def copy_model_files(found: tuple[Storage, list[str]], target: str, rewriting: Rewriting) -> list[str]:
    """Copy the files to the folder of the new weights; the configuration names their dtype."""
    storage, names = found
    dtypes = {dtype_name(tensor.dtype) for tensor in rewriting.tensors if tensor.dtype.is_floating_point}
    for name in names:
        content = read_file(storage, name)
        if name == CONFIG and len(dtypes) == 1:
            content = _with_dtype(content, *dtypes)
        storage_at(target).replace(name, content)
    return names


def _with_dtype(content: bytes, dtype: str) -> bytes:
    words = json.loads(content)
    keys = [key for key in DTYPE_KEYS if key in words] or [DTYPE_KEYS[0]]
    return json.dumps({**words, **dict.fromkeys(keys, dtype)}, indent=2).encode() + b"\n"


def missing_for_transformers(names: Sequence[str], has_config: bool) -> list[str]:
    """What keeps ``from_pretrained`` from loading tensors of these names, and what to do about it."""
    missing = []
    groups = [name.partition("/")[0] for name in names if "/" in name]
    if groups:
        group = "model" if "model" in groups else max(dict.fromkeys(groups), key=groups.count)
        missing.append(
            f"names begin with '{group}.', which a model's do not: --only '{group}/*' --rename '{group}/*=*'"
        )
    if not has_config:
        missing.append(f"there is no '{CONFIG}': --config FOLDER copies that of a model's folder, and its tokenizer")
    return missing
