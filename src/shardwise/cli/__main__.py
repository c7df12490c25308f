"""``python -m shardwise.cli`` is the command ``shardwise``."""

import sys

from shardwise.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
