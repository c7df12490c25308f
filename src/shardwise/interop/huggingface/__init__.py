"""Hugging Face: folders written and read in pieces, and patches of its libraries for sharded models.

- `pretrained`: `load`, which makes the model of a folder in pieces.
- `configuration`: the class that a configuration names, and its model without weights.
- `saving`, `loading`: `save_pretrained` and `load_pretrained`; `files` (where each tensor lies), `folder`, `names`.
- `models`: how transformers and peft save sharded models. `resizing`: resized embeddings. `trainers`: the Trainer.
- `generation`: `generate` of sharded models. `sequences`: the attention of sequences in pieces.
- `accelerators`, `loaders`: accelerate with sharded models, and its data loaders.
"""

from shardwise.interop.huggingface import accelerators, generation, loaders, models, resizing, sequences, trainers
from shardwise.interop.huggingface.loading import load_pretrained
from shardwise.interop.huggingface.pretrained import load
from shardwise.interop.huggingface.saving import save_pretrained

__all__ = [
    "accelerators",
    "generation",
    "load",
    "load_pretrained",
    "loaders",
    "models",
    "resizing",
    "save_pretrained",
    "sequences",
    "trainers",
]
