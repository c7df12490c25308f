"""``python -m shardwise.tools.cli`` is the command ``shardwise``."""

import sys

from shardwise_command import main

if __name__ == "__main__":
    sys.exit(main())
