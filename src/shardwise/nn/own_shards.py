"""Modules whose parameters stay where a plan has put them, whatever shares out the rest of the model."""

from __future__ import annotations

from torch import nn

MARK = "_keeps_own_shards"


def keep_own_shards(module: nn.Module) -> None:
    """Let the parameters of a module, without those of modules within it, stay as they are sharded. Copies do, too."""
    setattr(module, MARK, True)


def keeps_own_shards(module: nn.Module) -> bool:
    """Whether they stay."""
    return MARK in vars(module)
