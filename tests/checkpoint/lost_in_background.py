"""Loses a rank during a save in the background: ``python -m tests.checkpoint.lost_in_background FOLDER MOMENT``.

``before``: the last rank dies once the file of its part is there, of which most is not written yet.
``after``: once it has told rank 0 what it has written; ``between``: before, once the others have told. ``first``: rank
0 dies before it has heard of anybody; ``last``: before it completes the checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
from shardwright._core import CheckpointWriter
from shardwright.checkpoints import background
from torch import nn


def _dies(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_once_it_writes(path: Path) -> None:
    """Let this process die when the file of its part appears; it has a second checkpoint of this size to write."""

    def watch() -> None:
        while not list(path.glob(f".b_partial.writing/part-{smp.rank():05}*")):
            time.sleep(0.001)
        _dies()

    threading.Thread(target=watch, daemon=True).start()


def _arm(moment: str, folder: Path) -> None:
    """Let this rank die at that moment, or say that it has told."""
    kind, last = background.BackgroundSave, smp.rank() == smp.size() - 1
    tells, completes = kind._write_and_tell, kind._write_and_complete

    def waits() -> None:
        while len(list(folder.glob("told-*"))) < smp.size() - 2:
            time.sleep(0.01)

    def tells_and(self: Any) -> None:
        if last and moment == "between":
            waits()
            _dies()
        tells(self)
        (folder / f"told-{smp.rank()}").touch()
        if last and moment == "after":
            _dies()

    def completes_and(self: Any, commit: Callable[[list[str]], object]) -> None:
        if moment == "first":
            _dies()
        completes(self, _dies if moment == "last" else commit)

    kind._write_and_tell, kind._write_and_complete = tells_and, completes_and  # type: ignore[method-assign]


def meet_until_lost() -> None:
    """Wait for the others again and again; the rank that is to die comes to some of it."""
    while True:
        smp.barrier()


def main() -> None:
    """Save twice; a rank dies during the second one, of which the others are told, and end."""
    folder, moment = Path(sys.argv[1]), sys.argv[2]
    smp.init({"ddp": True})
    width = 8 if moment != "before" else 4096  # large enough to die while it is written
    model = smp.DistributedModel(nn.Linear(width, width))
    path = folder / "checkpoints"
    smp.save_checkpoint(path, "a", model=model)
    if moment != "before":
        _arm(moment, folder)
    elif smp.rank() == smp.size() - 1:
        _die_once_it_writes(path)
    lost = 0 if moment in ("first", "last") else smp.size() - 1
    try:
        smp.save_checkpoint(path, "b", model=model, asynchronous=True)
    except smp.PeerLostError as error:  # it was lost before the save could go on in the background
        if moment != "before" or error.rank != lost:
            raise
        print(json.dumps({"at_once": True}), flush=True)
    if smp.rank() == 0:
        # The lock goes with the save: nobody has to call anything.
        began = time.monotonic()
        CheckpointWriter(str(path), "other").lock(60.0)
        print(json.dumps({"locked": time.monotonic() - began}), flush=True)
    with pytest.raises(smp.PeerLostError) as raised:
        meet_until_lost()
    assert raised.value.rank == lost, raised.value
    began = time.monotonic()
    if smp.rank() == 1:  # what waits for the end of the save is told by an error, and otherwise the log
        with pytest.raises(smp.PeerLostError) as raised:
            smp.resume_from_checkpoint(path, model=model)
        assert raised.value.rank == lost, raised.value
    smp.shutdown()
    print(json.dumps({"ended": time.monotonic() - began}), flush=True)


if __name__ == "__main__":
    main()
