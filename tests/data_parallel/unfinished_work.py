"""One of two ranks, of which the other dies while this one's Python is about to end, with a collective under way."""

from __future__ import annotations

import atexit
import ctypes
import os
import time

# Called last, and with the interpreter's lock: Gloo's thread can take it only once Python has ended.
atexit.register(ctypes.PyDLL(None).usleep, 3_000_000)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from shardwright.process_groups import _never_destroy  # noqa: E402

DIES_AFTER_SECONDS = 1.5


def main() -> None:
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(DIES_AFTER_SECONDS)
        os._exit(9)
    work = dist.all_reduce(torch.zeros(1000), async_op=True)
    group = dist.group.WORLD
    assert group is not None, "it was just made"
    _never_destroy([group], [work])  # without the work it aborts in torch 2.11


if __name__ == "__main__":
    main()
