"""Run code that was written for `torch.distributed._shard` on shardwise, unchanged.

At the top of a program, before anything that imports the old system (DCP, FSDP and TorchRec do)::

    import shardwise.dropin
    shardwise.dropin.install()

    from torch.distributed._shard import sharded_tensor  # this is shardwise now

Or without touching the program::

    python -m shardwise.dropin train.py --steps 100
    python -m shardwise.dropin -m torch.distributed.run --nproc-per-node 4 train.py

Files: `table` (old names and ours), `modules` and `finder` (the old modules in memory, and their import),
`installation`, `corrections` (patches of torch), `old_functions`, `old_pickles`, `children` and `startup` (started
processes).
"""

from shardwise.dropin.installation import install, is_installed, uninstall
from shardwise.dropin.table import TABLE

__all__ = ["TABLE", "install", "is_installed", "uninstall"]
