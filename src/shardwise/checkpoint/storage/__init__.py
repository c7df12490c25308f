"""Where files lie: a directory, or a folder of an object store.

- `protocol`: the `Storage` and `OpenFile` protocols. `at`: the storage of a path or URL.
- `local`: directories. `remote`: object stores and web servers, through fsspec: `objects` (any driver), `s3`,
  `drivers` (fsspec's file systems), `parts` (uploads and requests in parts), `retries` (which failures are retried).
"""

from shardwise.checkpoint.storage.at import storage_at
from shardwise.checkpoint.storage.local import LocalStorage
from shardwise.checkpoint.storage.protocol import OpenFile, Storage
from shardwise.checkpoint.storage.remote import RemoteStorage

__all__ = ["LocalStorage", "OpenFile", "RemoteStorage", "Storage", "storage_at"]
