"""Checkpoints that lie somewhere, in any format: what is in them, and reading any boxes of it. Nothing is sent here."""

from shardwise.archive.archive import Archive
from shardwise.archive.opening import open_archive, read_index
from shardwise.archive.stored import Index, Spot, StoredTensor

__all__ = ["Archive", "Index", "Spot", "StoredTensor", "open_archive", "read_index"]
