"""Families of ops on sharded tensors. Importing this package registers them."""

from shardwise.ops import attributes, autograd, copies, creation, init

__all__ = ["attributes", "autograd", "copies", "creation", "init"]
