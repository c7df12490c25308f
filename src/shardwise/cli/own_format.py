"""Writing a checkpoint of any number of ranks in one process, a part of a tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwise.archive.index_file import FileWords, write_index
from shardwise.archive.values import encode
from shardwise.checkpoint.draft import FileDraft, draft_file, draft_tensors
from shardwise.checkpoint.generation import Generation
from shardwise.checkpoint.sharing_out import Source
from shardwise.cli.rewriting import Rewriting
from shardwise.layout import Layout
from shardwise.storage import storage_at


def write_own(rewriting: Rewriting, path: str, layouts: Mapping[str, Layout | None], ranks: int) -> dict[str, int]:
    """Write the files that so many ranks would, in the place of an older checkpoint if there is one.

    A tensor without a layout is whole on every rank: each file has a share of it. Gives the bytes of each file.
    """
    members = range(ranks)
    sources = [Source(one.name, one.dtype, one.size, layouts[one.name]) for one in rewriting.tensors]
    storage = storage_at(path)
    generation = Generation(storage)
    try:
        generation.begin()
        files: dict[int, FileWords] = {}
        for rank in members:
            draft = draft_file(generation.id, sources, members, rank)
            if draft is not None:
                sums: list[int] = []
                storage.write(draft.name, draft.buffers(_stretches(rewriting, draft), sums))
                files[rank] = draft.words(sums)
        tensors = draft_tensors(sources, members, {rank: number for number, rank in enumerate(files)})
        words = encode(rewriting.tree, rewriting.name)
        index = write_index(generation.id, list(files.values()), tensors, words)
        generation.commit(index, [file.name for file in files.values()])
    except BaseException:
        generation.discard()
        raise
    generation.clear()
    return {file.name: file.size for file in files.values()}


def _stretches(rewriting: Rewriting, draft: FileDraft) -> Iterator[tuple[memoryview, list[int]]]:
    for part in draft.parts.values():
        yield from rewriting.stretches(rewriting.tensors[part.source], part.offsets, part.sizes)


def all_whole(rewriting: Rewriting) -> dict[str, Layout | None]:
    """No tensor has a layout."""
    return {tensor.name: None for tensor in rewriting.tensors}
