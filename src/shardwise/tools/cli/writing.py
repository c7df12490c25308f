"""Writers of all formats: shardwise, safetensors (one file or a folder), torch.save, torch.distributed.checkpoint."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.checkpoint.archive.formats.dcp_writing import TensorLeaf, write_dcp
from shardwise.checkpoint.archive.index_file import FileRecord, write_index
from shardwise.checkpoint.archive.state_json import encode_tree
from shardwise.checkpoint.archive.state_tree import Node, NodeKind
from shardwise.checkpoint.archive.stored import dtype_name
from shardwise.checkpoint.archive.tensor_file import WRITTEN, TensorEntry, encode_header
from shardwise.checkpoint.draft import FileDraft, draft_file, draft_stored_tensors
from shardwise.checkpoint.generation import Generation
from shardwise.checkpoint.storage import storage_at
from shardwise.checkpoint.storage.at import URL
from shardwise.checkpoint.write_assignment import Source
from shardwise.layout import Layout
from shardwise.tools.cli.contents import UsageError
from shardwise.tools.cli.rewriting import COPIES, OutgoingTensor, Rewriting

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"


def write_safetensors_file(rewriting: Rewriting, path: str, names: dict[str, str] | None = None) -> dict[str, int]:
    """Write all tensors to one safetensors file, atomically; gives its bytes."""
    header, buffers = _safetensors(rewriting, rewriting.tensors, names or {})
    size = len(header) + rewriting.nbytes
    if URL.match(path):
        folder, _, name = path.rpartition("/")
        storage_at(folder).write(name, buffers)
        return {name: size}
    with _atomic_replacement(Path(path)) as part, open(part, "wb") as file:
        for buffer in buffers:
            file.write(buffer)
    return {Path(path).name: size}


def write_safetensors_folder(rewriting: Rewriting, path: str, most: int) -> dict[str, int]:
    """Write a Hugging Face folder: files of at most ``most`` bytes, and an index if there are several.

    Names have dots instead of slashes.
    """
    names = rewriting.dotted()
    groups: list[list[OutgoingTensor]] = [[]]
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


def write_torch_file(rewriting: Rewriting, path: str) -> dict[str, int]:
    """Write the state to a file of torch.save."""
    target = _local(path)
    with _atomic_replacement(target) as part, _filled_state(rewriting, target) as state:
        torch.save(state, part)
    return {target.name: target.stat().st_size}


def write_dcp_folder(rewriting: Rewriting, path: str) -> dict[str, int]:
    """Write the state to a folder of torch.distributed.checkpoint, one part at a time."""
    most = max(rewriting.max_memory // (COPIES + 1), 2**20)  # one more copy is the buffer of the file
    return write_dcp(storage_at(path), _leaves(rewriting.tree, (), rewriting), max_bytes=most)


def _leaves(
    node: Node, path: tuple[str | int, ...], rewriting: Rewriting
) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The leaves of the state for torch.distributed.checkpoint: lists and tuples of plain values stay whole."""
    if node.kind is NodeKind.TENSOR:
        tensor = rewriting.tensor(node)

        def read(offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
            part = tensor.read(offsets, sizes)
            rewriting.on_read(part.nbytes)
            return part

        yield path or ("state",), TensorLeaf(tensor.dtype, tensor.size, read)
    elif not node.children or (node.kind is not NodeKind.DICT and node.is_value()):
        yield path or ("state",), _state(node, rewriting, {})
    else:
        for key, child in node.children.items():
            # Numbers are indices of lists; keys of dicts are strings.
            yield from _leaves(child, (*path, str(key) if node.kind is NodeKind.DICT else key), rewriting)


def _safetensors(
    rewriting: Rewriting, tensors: Sequence[OutgoingTensor], names: dict[str, str]
) -> tuple[bytes, Iterator[memoryview]]:
    unknown = next((tensor for tensor in tensors if tensor.dtype not in WRITTEN), None)
    if unknown is not None:
        raise UsageError(
            f"'{unknown.name}' is {dtype_name(unknown.dtype)}, for which safetensors has no word: leave it out"
        )
    entries = {names.get(one.name, one.name): TensorEntry(one.dtype, tuple(one.size)) for one in tensors}
    header = encode_header(entries, {"format": "pt"})

    def buffers() -> Iterable[memoryview]:
        yield memoryview(header)
        for tensor in tensors:
            yield from rewriting.buffers(tensor)

    return header, iter(buffers())


@contextmanager
def _filled_state(rewriting: Rewriting, near: Path) -> Iterator[Any]:
    """The state with its tensors; beyond ``max_memory`` they are in memory-mapped files."""
    with tempfile.TemporaryDirectory(dir=near.absolute().parent, prefix=".shardwise-") as folder:
        mapped = rewriting.nbytes > rewriting.max_memory
        tensors: dict[str, torch.Tensor] = {}
        for number, tensor in enumerate(rewriting.tensors):
            memory = _mapped(Path(folder) / str(number), tensor.nbytes) if mapped else np.empty(tensor.nbytes, np.uint8)
            begin = 0
            for buffer in rewriting.buffers(tensor):
                memory[begin : begin + buffer.nbytes] = np.frombuffer(buffer, np.uint8)
                begin += buffer.nbytes
            filled = torch.from_numpy(memory).view(tensor.dtype) if begin else torch.empty(0, dtype=tensor.dtype)
            tensors[tensor.name] = filled.view(tensor.size)
        yield _state(rewriting.tree, rewriting, tensors)


def _mapped(path: Path, nbytes: int) -> Any:
    return np.memmap(path, np.uint8, "w+", shape=(nbytes,)) if nbytes else np.empty(0, np.uint8)


def _state(node: Node, rewriting: Rewriting, tensors: dict[str, torch.Tensor]) -> Any:
    if node.kind is NodeKind.TENSOR:
        return tensors[rewriting.name(node)]
    if node.kind is NodeKind.VALUE:
        return node.value
    inner = {key: _state(child, rewriting, tensors) for key, child in node.children.items()}
    if node.kind is NodeKind.DICT:
        return inner
    return list(inner.values()) if node.kind is NodeKind.LIST else tuple(inner.values())


def _local(path: str) -> Path:
    if URL.match(path):
        raise UsageError(f"torch writes to local paths only, not to '{path}'")
    return Path(path)


@contextmanager
def _atomic_replacement(path: Path) -> Iterator[Path]:
    """A temporary file that replaces ``path`` at the end, or is removed."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        with suppress(FileNotFoundError):
            part.unlink()
        raise


def write_checkpoint(
    rewriting: Rewriting, path: str, layouts: Mapping[str, Layout | None], ranks: int
) -> dict[str, int]:
    """Write a checkpoint as ``ranks`` ranks would, replacing an older one; gives the bytes of each file.

    A tensor without a layout is whole on every rank: each file has a share of it.
    """
    members = range(ranks)
    sources = [Source(one.name, one.dtype, one.size, layouts[one.name]) for one in rewriting.tensors]
    storage = storage_at(path)
    generation = Generation(storage)
    try:
        generation.begin()
        files: dict[int, FileRecord] = {}
        for rank in members:
            draft = draft_file(generation.id, sources, members, rank)
            if draft is not None:
                sums: list[int] = []
                storage.write(draft.name, draft.buffers(_draft_buffers(rewriting, draft), sums))
                files[rank] = draft.record(sums)
        tensors = draft_stored_tensors(sources, members, {rank: number for number, rank in enumerate(files)})
        state = encode_tree(rewriting.tree, rewriting.name)
        index = write_index(generation.id, list(files.values()), tensors, state)
        generation.commit(index, [file.name for file in files.values()])
    except BaseException:
        generation.discard()
        raise
    generation.clear()
    return {file.name: file.size for file in files.values()}


def _draft_buffers(rewriting: Rewriting, draft: FileDraft) -> Iterator[tuple[memoryview, list[int]]]:
    for part in draft.parts.values():
        yield from rewriting.block_buffers(rewriting.tensors[part.source], part.offsets, part.sizes)


def whole_layouts(rewriting: Rewriting) -> dict[str, Layout | None]:
    """No layout for any tensor: whole on every rank."""
    return {tensor.name: None for tensor in rewriting.tensors}
