"""A rank that takes a step with an optimizer.

usage: warned.py KEYS
"""

from __future__ import annotations

import json
import sys

import shardwright as smp
import torch
from shardwright.optimizer.offloading import StreamedState

from tests.optimizer_offloading.problems import wrap


def main() -> None:
    smp.init(json.loads(sys.argv[1]))
    weight = torch.nn.Parameter(torch.ones(64, 64))
    optimizer = wrap(torch.optim.Adam([weight]))
    weight.grad = torch.ones(64, 64)
    optimizer.step()
    print("streamed:", isinstance(optimizer, StreamedState))
    smp.shutdown()


if __name__ == "__main__":
    main()
