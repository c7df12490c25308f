"""Whole states moved between ranks and jobs, under other names and in other forms."""

from shardwise.state_transfer.expression import Expression, cat, interleave, pad, stack, take
from shardwise.state_transfer.recipe import Recipe
from shardwise.state_transfer.resize import resize
from shardwise.state_transfer.transfer import StateTransfer, TransferHandle

__all__ = [
    "Expression",
    "Recipe",
    "StateTransfer",
    "TransferHandle",
    "cat",
    "interleave",
    "pad",
    "resize",
    "stack",
    "take",
]
