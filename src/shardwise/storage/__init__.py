"""Where files lie: a directory, or a folder of an object store."""

from shardwise.storage.at import storage_at
from shardwise.storage.local import LocalStorage
from shardwise.storage.place import OpenFile, Storage
from shardwise.storage.remote import RemoteStorage

__all__ = ["LocalStorage", "OpenFile", "RemoteStorage", "Storage", "storage_at"]
