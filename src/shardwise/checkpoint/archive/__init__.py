"""Checkpoints in files, of any format: their index, and reading any box of any tensor. No communication.

- `opening`: detects the format and opens an `Archive` (`archive`), which reads boxes.
- `stored`: `Index`, `StoredTensor` and `FileLocation`, the same for all formats.
- `index_file`, `tensor_file`, `layout_json`, `state_json`: shardwise's own format.
- `blocks`: what has a checksum. `slabs`, `reading`: boxes read into tensors. `memory`: tensors as bytes.
- `state_tree`: a state as a tree. `formats`: other libraries' formats.
"""

from shardwise.checkpoint.archive.archive import Archive
from shardwise.checkpoint.archive.opening import find_checkpoint, open_archive, read_index
from shardwise.checkpoint.archive.stored import FileLocation, Index, StoredTensor

__all__ = ["Archive", "FileLocation", "Index", "StoredTensor", "find_checkpoint", "open_archive", "read_index"]
