"""Attention over sequences in pieces: a rank keeps its queries, and keys and values come to it round by round.

- ``visibility``: which keys a query sees, and into which blocks pieces of queries and keys fall; ``documents``
- ``block_plan``: which keys come to which rank in which round, and the blocks that this rank computes then
- ``kernels``: one block forward and backward, with the log-sum-exp of its scores; ``merging``: results of blocks;
  ``dropout``: which weights are dropped
- ``in_pieces``: all of it under autograd; ``ops``: on sharded tensors; ``function``: `attention`, for users
"""

from shardwise.ops.attention.documents import Documents
from shardwise.ops.attention.function import attention

__all__ = ["Documents", "attention"]
