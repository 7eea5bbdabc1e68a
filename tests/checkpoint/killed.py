"""A job of which a rank is killed while it saves: ``python -m tests.checkpoint.killed FOLDER``."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest
import shardwright as smp
from shardwright.checkpoints import saving

from tests.checkpoint.models import Training


def main() -> None:
    """Save twice; the second time rank 1 dies after the ranks have agreed on what is held."""
    smp.init({"microbatches": 2, "ddp": True})
    training = Training()
    training.run(1)
    smp.save_checkpoint(sys.argv[1], "a", user_content="before")

    def dies(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if smp.rank() == 1:
        saving.CheckpointWriter = dies  # type: ignore[assignment, misc]
    with pytest.raises(smp.PeerLostError) as raised:
        smp.save_checkpoint(sys.argv[1], "b", user_content="after")
    assert raised.value.rank == 1
    assert not hasattr(raised.value, "__notes__"), raised.value.__notes__  # where the call is written is not the reason
    sys.stdout.write("told\n")


if __name__ == "__main__":
    main()
