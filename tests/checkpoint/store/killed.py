"""A job that is killed while it saves into a store: ``python -m tests.checkpoint.store.killed PATH BYTES``."""

from __future__ import annotations

import sys

import shardwright as smp
import torch

from tests.checkpoint.models import Training


def main() -> None:
    """Save twice; the second time there is much to write, and the test ends the ranks meanwhile."""
    smp.init({"microbatches": 2, "ddp": True})
    training = Training()
    training.run(1)
    smp.save_checkpoint(sys.argv[1], "before", user_content="before")
    smp.save_checkpoint(sys.argv[1], "after", user_content=torch.zeros(int(sys.argv[2]), dtype=torch.uint8))
    sys.stdout.write("saved\n")


if __name__ == "__main__":
    main()
