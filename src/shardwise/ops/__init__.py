"""Ops on sharded tensors. Importing this package registers them.

- ``engine``: how a call is computed on shards: cache, decomposition, rules, schedules
- ``families``: the rules and handlers of ops, by kind
- ``attention``: over sequences in pieces, with windows and documents
- ``embedding``: looking up in sharded tables
- ``autograd``: hooks, custom Functions and backwards of torch, on the graph of the local shards
- ``validation``: which checks between ranks are made
"""

from shardwise.ops import attention, autograd, embedding, engine, families, validation

__all__ = ["attention", "autograd", "embedding", "engine", "families", "validation"]
