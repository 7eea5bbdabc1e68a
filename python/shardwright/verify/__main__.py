"""``python -m shardwright.verify``. See :mod:`shardwright.verify.command`."""

import sys

from shardwright.verify.command import main

if __name__ == "__main__":
    sys.exit(main())
