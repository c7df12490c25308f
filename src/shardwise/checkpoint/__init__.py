"""Checkpoints: a state in one safetensors file per rank and one index, read into any layout on any number of ranks."""

from shardwise.checkpoint.index import Index, Piece, StoredTensor, read_index
from shardwise.checkpoint.loading import load
from shardwise.checkpoint.saving import save
from shardwise.checkpoint.storage import LocalStorage, Storage

__all__ = ["Index", "LocalStorage", "Piece", "Storage", "StoredTensor", "load", "read_index", "save"]
