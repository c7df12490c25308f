"""Lightning: `strategy` trains sharded models; `patches` lets Lightning's own strategies refuse what would fail.

Importing this package does not import Lightning; `strategy` does.
"""

from shardwise.interop.lightning import patches

__all__ = ["patches"]
