"""Checkpoints: a state in one safetensors file per rank and one index, read into any layout on any number of ranks."""

from shardwise.archive import Archive, Index, StoredTensor, open_archive, read_index
from shardwise.checkpoint.background import SaveHandle
from shardwise.checkpoint.loading import load
from shardwise.checkpoint.saving import save
from shardwise.checkpoint.steps import Checkpoints
from shardwise.checkpoint.verifying import Verified, verify
from shardwise.storage import LocalStorage, RemoteStorage, Storage

__all__ = [
    "Archive",
    "Checkpoints",
    "Index",
    "LocalStorage",
    "RemoteStorage",
    "SaveHandle",
    "Storage",
    "StoredTensor",
    "Verified",
    "load",
    "open_archive",
    "read_index",
    "save",
    "verify",
]
