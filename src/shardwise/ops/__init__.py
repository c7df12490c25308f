"""Families of ops on sharded tensors. Importing this package registers them."""

from shardwise.ops import attributes, copies, creation

__all__ = ["attributes", "copies", "creation"]
