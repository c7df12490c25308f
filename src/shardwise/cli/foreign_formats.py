"""Writing formats of others: safetensors, in one file or a folder, torch.save, and torch.distributed.checkpoint."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.archive.formats.dcp_writing import TensorLeaf
from shardwise.archive.formats.dcp_writing import write_dcp as write_to_dcp
from shardwise.archive.nest import Kind, Node
from shardwise.archive.tensor_file import WRITTEN, Entry, header_of
from shardwise.cli.contents import UsageError, dtype_text
from shardwise.cli.rewriting import ROOM, Outgoing, Rewriting
from shardwise.storage import storage_at
from shardwise.storage.at import URL

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"


def write_file(rewriting: Rewriting, path: str, names: dict[str, str] | None = None) -> dict[str, int]:
    """All tensors in one safetensors file, which is there whole or not at all; gives its bytes."""
    header, buffers = _safetensors(rewriting, rewriting.tensors, names or {})
    size = len(header) + rewriting.nbytes
    if URL.match(path):
        folder, _, name = path.rpartition("/")
        storage_at(folder).write(name, buffers)
        return {name: size}
    with _in_place_of(Path(path)) as part, open(part, "wb") as file:
        for buffer in buffers:
            file.write(buffer)
    return {Path(path).name: size}


def write_folder(rewriting: Rewriting, path: str, most: int) -> dict[str, int]:
    """A folder as Hugging Face's libraries have it: files of at most so many bytes, and an index if there are several.

    Names get dots between their parts.
    """
    names = rewriting.dotted()
    groups: list[list[Outgoing]] = [[]]
    for tensor in rewriting.tensors:
        if groups[-1] and sum(one.nbytes for one in groups[-1]) + tensor.nbytes > most:
            groups.append([])
        groups[-1].append(tensor)
    files = (
        [ONE]
        if len(groups) == 1
        else [f"model-{k + 1:05d}-of-{len(groups):05d}.safetensors" for k in range(len(groups))]
    )
    storage, written, sizes = storage_at(path), list[str](), dict[str, int]()
    with storage.writing():
        try:
            for file, group in zip(files, groups, strict=True):
                header, buffers = _safetensors(rewriting, group, names)
                written.append(file)
                storage.write(file, buffers)
                sizes[file] = len(header) + sum(tensor.nbytes for tensor in group)
            if len(groups) > 1:
                pairs = zip(files, groups, strict=True)
                weight_map = {names[tensor.name]: file for file, group in pairs for tensor in group}
                words = {"metadata": {"total_size": rewriting.nbytes}, "weight_map": weight_map}
                storage.replace(INDEX, json.dumps(words, indent=2).encode())
        except BaseException:
            storage.remove(written)
            raise
    return sizes


def write_torch(rewriting: Rewriting, path: str) -> dict[str, int]:
    """The state in one file of torch.save."""
    target = _local(path)
    with _in_place_of(target) as part, _in_memory(rewriting, target) as state:
        torch.save(state, part)
    return {target.name: target.stat().st_size}


def write_dcp(rewriting: Rewriting, path: str) -> dict[str, int]:
    """The state in a folder of torch.distributed.checkpoint, a part at a time."""
    most = max(rewriting.max_memory // (ROOM + 1), 2**20)  # it is in memory as a part of the file, too
    return write_to_dcp(storage_at(path), _leaves(rewriting.tree, (), rewriting), max_bytes=most)


def _leaves(
    node: Node, path: tuple[str | int, ...], rewriting: Rewriting
) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The leaves of the state as torch.distributed.checkpoint cuts it: lists and tuples of plain values are whole."""
    if node.kind is Kind.TENSOR:
        tensor = rewriting.tensor(node)

        def read(offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
            part = tensor.read(offsets, sizes)
            rewriting.told(part.nbytes)
            return part

        yield path or ("state",), TensorLeaf(tensor.dtype, tensor.size, read)
    elif not node.children or (node.kind is not Kind.DICT and node.is_value()):
        yield path or ("state",), _state(node, rewriting, {})
    else:
        for key, child in node.children.items():
            # It reads numbers as indices of lists, and has only strings as keys of dicts.
            yield from _leaves(child, (*path, str(key) if node.kind is Kind.DICT else key), rewriting)


def _safetensors(
    rewriting: Rewriting, tensors: Sequence[Outgoing], names: dict[str, str]
) -> tuple[bytes, Iterator[memoryview]]:
    unknown = next((tensor for tensor in tensors if tensor.dtype not in WRITTEN), None)
    if unknown is not None:
        raise UsageError(
            f"'{unknown.name}' is {dtype_text(unknown.dtype)}, for which safetensors has no word: leave it out"
        )
    entries = {names.get(one.name, one.name): Entry(one.dtype, tuple(one.size)) for one in tensors}
    header = header_of(entries, {"format": "pt"})

    def buffers() -> Iterable[memoryview]:
        yield memoryview(header)
        for tensor in tensors:
            yield from rewriting.buffers(tensor)

    return header, iter(buffers())


@contextmanager
def _in_memory(rewriting: Rewriting, near: Path) -> Iterator[Any]:
    """The state with its tensors filled; those that are beyond the memory which may be used are in a file."""
    with tempfile.TemporaryDirectory(dir=near.absolute().parent, prefix=".shardwise-") as folder:
        mapped = rewriting.nbytes > rewriting.max_memory
        made: dict[str, torch.Tensor] = {}
        for number, tensor in enumerate(rewriting.tensors):
            memory = _mapped(Path(folder) / str(number), tensor.nbytes) if mapped else np.empty(tensor.nbytes, np.uint8)
            begin = 0
            for buffer in rewriting.buffers(tensor):
                memory[begin : begin + buffer.nbytes] = np.frombuffer(buffer, np.uint8)
                begin += buffer.nbytes
            filled = torch.from_numpy(memory).view(tensor.dtype) if begin else torch.empty(0, dtype=tensor.dtype)
            made[tensor.name] = filled.view(tensor.size)
        yield _state(rewriting.tree, rewriting, made)


def _mapped(path: Path, nbytes: int) -> Any:
    return np.memmap(path, np.uint8, "w+", shape=(nbytes,)) if nbytes else np.empty(0, np.uint8)


def _state(node: Node, rewriting: Rewriting, made: dict[str, torch.Tensor]) -> Any:
    if node.kind is Kind.TENSOR:
        return made[rewriting.name(node)]
    if node.kind is Kind.VALUE:
        return node.own
    inner = {key: _state(child, rewriting, made) for key, child in node.children.items()}
    if node.kind is Kind.DICT:
        return inner
    return list(inner.values()) if node.kind is Kind.LIST else tuple(inner.values())


def _local(path: str) -> Path:
    if URL.match(path):
        raise UsageError(f"torch writes to local paths only, not to '{path}'")
    return Path(path)


@contextmanager
def _in_place_of(path: Path) -> Iterator[Path]:
    """A file beside this one that becomes it in the end, or is removed."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        with suppress(FileNotFoundError):
            part.unlink()
        raise
