"""The command line, ``shardwise``: inspects, verifies, compares and rewrites checkpoints, without a model or a GPU.

- `running`: runs a command, each in its own file: `show` (inspect), `verify`, `diff`, `reshard`, `convert`, `extract`,
  `merge`, `doctor`. Their options and help are in `shardwise_command`, which is imported without torch.
  `measure` is the part of `doctor` that measures devices.
- `target`: checks of the place to write to. `console`: tables, JSON and progress.
- `pairing`, `tensor_difference`: which entries `diff` compares, and how far their values are apart.
- `contents`: the entries of a checkpoint by name; `near_names`: what may have been meant by an unknown one.
- `rewriting`, `writing`: what is read, and the formats that are written; `model_files`: what lies beside the weights.
- `plan_file`: plans in JSON.
"""

from shardwise_command import main

__all__ = ["main"]
