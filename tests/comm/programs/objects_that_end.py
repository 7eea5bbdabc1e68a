"""A rank whose objects are ``large``, whose peer is ``lost``, or who is sent more than it takes (``overflow``)."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import shardwright as smp
import torch

BY = smp.RankType.WORLD_RANK
GIBIBYTE = 1 << 30
#: How many objects may wait.
CAPACITY = 65_536


def resident(which: str) -> int:
    """What the system says of this process's memory, in bytes."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which)]
    return int(line.split()[1]) << 10


def large() -> None:
    """An object of 1 GiB crosses, each side holding one copy of it besides the sender's own."""
    value: Any = None
    if smp.rank() == 0:
        value = {"half": torch.ones(GIBIBYTE // 16, dtype=torch.float64), "other": torch.zeros(GIBIBYTE // 2).byte()}
    smp.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, own = resident("VmRSS"), resident("RssAnon")
    for _ in range(2):  # the second one finds room where the first lay
        if smp.rank() == 0:
            smp.send(value, 1, BY)
        else:
            received = smp.recv_from(0, BY)
            assert received["half"].sum() == GIBIBYTE // 16
            assert not received["other"].any()
            del received
        smp.barrier()
    grown = (resident("VmHWM") - before) / GIBIBYTE
    assert 0.9 < grown < 1.1, f"rank {smp.rank()} grew by {grown:.2f} GiB"
    # What has been shared stays mapped.
    kept = (resident("RssAnon") - own) / GIBIBYTE
    assert kept < 0.1, f"rank {smp.rank()} keeps {kept:.2f} GiB"
    say("done")


def lost() -> None:
    """What the last rank had sent is received; then its death is told to who waits for it, and to who sends to it."""
    if smp.rank() == 2:
        for rank in range(2):
            smp.send("last words", rank, BY)
        smp.barrier()
        smp.recv_from(0, BY)
        os.kill(os.getpid(), signal.SIGKILL)
    smp.barrier()  # the last words have arrived here, for messages keep their order
    if smp.rank() == 0:
        # A barrier is over where the others have entered it, wherever they are.
        assert smp.recv_from(1, BY) == "arrived"
        smp.send("end", 2, BY)
        say(f"waiting: {failure(lambda: [smp.recv_from(2, BY) for _ in range(2)])}")
        smp.send("it is gone", 1, BY)
        say(f"sending: {failure(lambda: smp.send(1, 2, BY))}")
        assert smp.recv_from(1, BY) == 1  # the broadcast reached who was before the dead rank
        assert smp.recv_from(1, BY) == "all said"
    else:
        smp.send("arrived", 0, BY)
        assert smp.recv_from(0, BY) == "it is gone"
        assert smp.recv_from(2, BY) == "last words"
        say(f"broadcast: {failure(lambda: smp.broadcast(1, smp.WORLD))}")
        say(f"gather: {failure(lambda: smp.allgather(1, smp.WORLD))}")
        say(f"barrier: {failure(smp.barrier)}")
        smp.send("all said", 0, BY)


def gathering() -> None:
    """The death of a rank is told to one that waits in a gather for another, which does not come."""
    smp.barrier()
    if smp.rank() == 2:
        smp.recv_from(0, BY)
        os.kill(os.getpid(), signal.SIGKILL)
    elif smp.rank() == 0:
        assert smp.recv_from(1, BY) == "gathering"
        time.sleep(0.3)  # in which rank 1 begins to wait
        smp.send("end", 2, BY)
        assert smp.recv_from(1, BY) == "said"
    else:
        smp.send("gathering", 0, BY)
        say(f"gather: {failure(lambda: smp.allgather(1, smp.WORLD))}")
        smp.send("said", 0, BY)


def overflow() -> None:
    """More objects than may wait are an error where they are received, after those that had room."""
    if smp.rank() == 1:
        for number in range(CAPACITY + 1):
            smp.send(number, 0, BY)
        smp.send("all sent", 0, BY)
        smp.allgather(None, smp.WORLD)
    else:
        first = failure(lambda: smp.allgather(None, smp.WORLD))  # whose object had no room either
        for number in range(CAPACITY):
            assert smp.recv_from(1, BY) == number
        assert failure(lambda: smp.recv_from(1, BY)) == first
        say(first)


def failure(call: Any) -> str:
    """The error that a call must raise."""
    try:
        call()
    except smp.ShardwrightError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def say(text: str) -> None:
    """Tell the test."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    smp.init({"pipeline_parallel_degree": 1, "ddp": True, "stall_timeout_seconds": 60})
    globals()[sys.argv[1]]()
