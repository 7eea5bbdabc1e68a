"""A rank of a job whose ranks freeze different parameters of one model: every one of them is told so.

``frozen.py PP TP``; the world size gives the rest.
"""

from __future__ import annotations

import sys

import pytest
import shardwright as smp
from torch import nn

#: A module that is replaced where there are tp ranks, one that never is, and one that is half frozen.
NAMES = ("0.weight", "1.weight", "2.bias")


def model() -> nn.Sequential:
    with smp.tensor_parallelism():
        replaced = nn.Linear(8, 8)
    with smp.tensor_parallelism():
        half = nn.Linear(8, 8)
    return nn.Sequential(replaced, nn.LayerNorm(8), half)


def main() -> None:
    smp.init({"pipeline_parallel_degree": int(sys.argv[1]), "tensor_parallel_degree": int(sys.argv[2]), "ddp": True})
    last = smp.tp_rank() == smp.tp_size() - 1 if smp.tp_size() > 1 else smp.dp_rank() == smp.dp_size() - 1
    for freezes in (last, not last):
        for name in NAMES:
            differing = model()
            differing.get_parameter(name).requires_grad_(not freezes)
            with pytest.raises(smp.ConfigError) as caught:
                smp.DistributedModel(differing)
            print(f"refused: {caught.value}")
    alike = model()
    alike[0].requires_grad_(False)
    alike[1].bias.requires_grad_(False)
    alike = smp.DistributedModel(alike).module
    assert [name for name, one in alike.named_parameters() if not one.requires_grad and name != "0.bias"] == [
        "0.weight",
        "1.bias",
    ]
    smp.shutdown()


if __name__ == "__main__":
    main()
