"""The command line, ``shardwise``: checkpoints looked at, checked, compared and rewritten, without a model or a GPU."""

from shardwise.cli.main import main

__all__ = ["main"]
