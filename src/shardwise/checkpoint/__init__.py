"""Checkpoints: a state in one safetensors file per rank and one index, read into any layout on any number of ranks.

- Saving: `saving` (the steps), `snapshot` (the state that ranks agree on), `write_assignment` (who writes what),
  `draft` (the files), `streams` (the bytes), `generation` (new files beside old ones, commit), `background`.
- Loading: `loading` (the steps), `renaming` and `matching` (which stored tensor fills which), `filling` (what each rank
  reads), `relay` (read once and sent).
- Both: `ranks`, `local` (a tensor's boxes on this rank), `optimizers` (states that do not exist yet), `progress`.
- `steps`: numbered checkpoints of a training. `verifying`: checksums, without a model.
- `archive`: what lies in files, of any format. `storage`: where files lie.
"""

from shardwise.checkpoint.archive import Archive, Index, StoredTensor, open_archive, read_index
from shardwise.checkpoint.background import SaveHandle
from shardwise.checkpoint.loading import load
from shardwise.checkpoint.saving import save
from shardwise.checkpoint.steps import Checkpoints
from shardwise.checkpoint.storage import LocalStorage, RemoteStorage, Storage
from shardwise.checkpoint.verifying import Verified, verify

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
