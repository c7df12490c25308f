"""The command line, ``shardwise``: inspects, verifies, compares and rewrites checkpoints, without a model or a GPU.

- `main`: the commands, each in its own file: `show` (inspect), `verify`, `diff`, `reshard`, `convert`, `extract`,
  `merge`, `doctor`. `usage`: options that they share, and checks of the target. `console`: tables, JSON and progress.
- `contents`: the entries of a checkpoint by name. `rewriting`, `writing`: what is read, and the formats that are
  written.
- `plan_file`: plans in JSON.
"""

from shardwise.tools.cli.main import main

__all__ = ["main"]
