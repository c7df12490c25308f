"""Looking up in sharded tables: only ids and the rows that they name travel, or partial sums of the rows of a few ids.

- ``ops``: `embedding` and `embedding_bag`; ``portion``, ``bags``: the ids or bags of this rank, and the sharded result
- ``local_rows``: tables that every rank has whole
- ``masked_sums``: rows that are added up, for small batches and in captures
- ``lookup``: the look-up of this rank's ids; ``differentiable_rows``: under autograd
- ``rows``: the exchange of rows with other ranks; ``route``: the rank of each row; ``pieces``: packing
"""

from shardwise.ops.embedding import ops

__all__ = ["ops"]
