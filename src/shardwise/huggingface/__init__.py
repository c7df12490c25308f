"""Folders of Hugging Face, written and read in pieces, and what its libraries are told of sharded models."""

from shardwise.huggingface import accelerators, adapters, loaders, models, resizing, trainers
from shardwise.huggingface.loading import load_pretrained
from shardwise.huggingface.saving import save_pretrained

__all__ = [
    "accelerators",
    "adapters",
    "load_pretrained",
    "loaders",
    "models",
    "resizing",
    "save_pretrained",
    "trainers",
]
