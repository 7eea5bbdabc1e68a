"""A rank whose disk is full when the optimizer makes its state.

usage: full.py
"""

from __future__ import annotations

import json
import resource

import shardwright as smp
import torch
from shardwright.errors import ShardwrightError

from tests.optimizer_offloading.problems import wrap


def main() -> None:
    smp.init({"offload_optimizer": "disk"})
    weight = torch.nn.Parameter(torch.ones(512, 512))
    optimizer = wrap(torch.optim.Adam([weight]))
    weight.grad = torch.ones(512, 512)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    found = {"kind": "", "text": ""}
    try:
        optimizer.step()
    except ShardwrightError as error:
        found = {"kind": type(error).__name__, "text": str(error)}
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    print("found: " + json.dumps(found), flush=True)
    smp.shutdown()


if __name__ == "__main__":
    main()
