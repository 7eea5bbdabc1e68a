"""``python -m shardwright``: the command ``shardwright``."""

import sys

from shardwright.command import main

if __name__ == "__main__":
    sys.exit(main())
