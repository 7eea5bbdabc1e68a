"""A script that makes a process group of its own beside the job: ``own_group.py before|after``."""

from __future__ import annotations

import sys

import common
import torch
import torch.distributed as dist
from common import say


def main() -> None:
    if sys.argv[1] == "before":
        dist.init_process_group("gloo")
    job = common.start()
    if sys.argv[1] == "after":
        dist.init_process_group("gloo")
    total = torch.ones(3)
    dist.all_reduce(total)
    say("done", error=job.exact_step(), total=total.tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
