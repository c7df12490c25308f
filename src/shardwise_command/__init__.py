"""The command ``shardwise``: parses the command line without importing torch.

Help, the version and usage errors need the standard library alone. So this package lies beside `shardwise`, which
imports torch; a command that runs imports `shardwise.tools.cli`, where its code is.

- `main`: the entry of the console script. `commands`: each command with its options and its help. `usage`: the format
  of the help, and options that commands share. `suggestions`: for words that were mistyped. `completion`: scripts for
  shells. `byte_counts`: parses a number of bytes.
"""

from shardwise_command.main import main

__all__ = ["main"]
