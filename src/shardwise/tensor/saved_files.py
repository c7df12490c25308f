"""Only one rank may `torch.save` shards to a file: the last of several writers would overwrite the others.

A pickled tensor does not know the file, but `torch.save` does, further up the stack. The first rank that writes to a
file leaves its rank in the store of the job, and a second one raises. The key has the host and the inode: the same path
on another host, or a file that was moved since, is another file.
"""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import torch
import torch.distributed as dist

from shardwise import settings
from shardwise.comm.group import or_default, store_of, talks
from shardwise.comm.peers import notify_of_failure
from shardwise.errors import CheckpointError

_SAVE = torch.serialization.save.__code__

INSTEAD = (
    "call shardwise.save(state, folder) on every rank, for shardwise.load on any number of ranks; or give each rank a "
    'file of its own, f"rank{dist.get_rank()}.pt", for torch.load on the same rank; or save plain values on one rank, '
    "of tensor.full_tensor() on every rank"
)


def require_own_file(writers: int) -> None:
    """Raise if `torch.save` is writing a tensor of so many ranks to a file that another rank has written to."""
    if writers > 1 and not settings.current().shared_files:
        path = _path_of(_target_of_torch_save())
        if path is not None:
            found = os.stat(path)
            require_own_path(path, writers, number=f"{found.st_dev}-{found.st_ino}")


def require_own_path(path: str | os.PathLike[str], writers: int, *, instead: str = INSTEAD, number: str = "") -> None:
    """Raise if this rank is about to write a tensor of so many ranks to a path that another rank has written to.

    The number, if known, tells files apart that had the same path one after another. Nothing is sent to other ranks:
    they learn of the error when they next communicate with this one.
    """
    group = or_default(None)
    store = store_of(group) if talks(group) else None
    if writers < 2 or store is None or settings.current().shared_files:
        return
    key = f"shardwise/file/{platform.node()}/{number}/{os.path.realpath(path)}"
    first = int(store.compare_set(key, "", str(dist.get_rank())))
    if first != dist.get_rank():
        error = CheckpointError(
            f"rank {dist.get_rank()} is saving its shards to {str(path)!r}, where rank {first} has saved its own: the "
            f"file would hold one rank's part of the sharded tensors. Instead, {instead}"
        )
        notify_of_failure(group, error)
        raise error


def _target_of_torch_save() -> Any:
    """The file that was given to `torch.save`, if it is on the stack."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not _SAVE:
        frame = frame.f_back  # type: ignore[assignment] # None at the end
    return None if frame is None else frame.f_locals.get("f")


def _path_of(target: Any) -> str | None:
    """The path of a file on disk, given as such or opened."""
    path = target if isinstance(target, str | os.PathLike) else getattr(target, "name", None)
    if not isinstance(path, str | os.PathLike):
        return None
    path = os.fspath(path)
    return path if isinstance(path, str) and os.path.isfile(path) else None
