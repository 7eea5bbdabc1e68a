"""Forks in a training, and tries to train in the child, which ends as a process of Python does."""

from __future__ import annotations

import os
import sys
import time

import common
import shardwright as smp
from common import say


def main() -> None:
    job = common.start()
    say("exact", error=job.exact_step())
    child = os.fork()
    if child == 0:
        try:
            job.step()
        except smp.ShardwrightError as error:
            say("refused", text=str(error))
        sys.exit(0)
    began = time.monotonic()
    _, status = os.waitpid(child, 0)
    say("child", seconds=time.monotonic() - began, code=os.waitstatus_to_exitcode(status))
    say("exact", error=job.exact_step())


if __name__ == "__main__":
    main()
