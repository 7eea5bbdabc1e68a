"""A rank that starts again and again, each time with another device that it tells the others of; a line for each start.

The machine needs no GPU: what a rank tells is written here, and where the answer is NCCL, the call that would make the
group is looked at instead.
"""

from __future__ import annotations

import json
import os
from typing import Any
from unittest.mock import patch

import shardwright as smp
import torch
import torch.distributed as dist
from shardwright import process_groups


class Asked(Exception):
    """Raised instead of making a group."""


def facts(rank: int, device: str | None, gpu: str | None = None, nccl: bool = True) -> str:
    return json.dumps(
        {"host": "a", "device": device, "gpu": gpu or device, "has_gloo": True, "has_nccl": nccl, "group": None}
    )


#: By name: the key, and the devices of ranks.
STARTS: dict[str, tuple[str, list[Any]]] = {
    "a device each": ("auto", ["GPU-0", "GPU-1", "GPU-2"]),
    "a device shared": ("auto", ["GPU-0", "GPU-1", "GPU-0"]),
    "processors": ("auto", [None, None, None]),
    "one without": ("auto", ["GPU-0", "GPU-1", None]),
    "one without, gloo": ("gloo", ["GPU-0", "GPU-1", None]),
    "a device shared, nccl": ("nccl", ["GPU-0", "GPU-1", "GPU-0"]),
    "a device each, nccl": ("nccl", ["GPU-0", "GPU-1", "GPU-2"]),
    "a device each, gloo": ("gloo", ["GPU-0", "GPU-1", "GPU-2"]),
    "processors, nccl": ("nccl", [None, None, None]),
}


def start(asked: str, device: str | None) -> dict[str, Any]:
    told = facts(int(os.environ["RANK"]), device)
    calls: list[tuple[str, Any]] = []

    def look(back_end: str, **keys: Any) -> None:
        calls.append((back_end, keys["device_id"]))
        if "nccl" in back_end:
            raise Asked
        init_process_group(back_end, **keys)

    init_process_group = dist.init_process_group
    try:
        with (
            patch.object(process_groups, "own_facts", lambda place: told),
            patch.object(dist, "init_process_group", look),
        ):
            smp.init({"ddp": True, "ddp_dist_backend": asked})
        total = torch.ones(2)
        dist.all_reduce(total)
        return {"calls": [back_end for back_end, _ in calls], "total": total.tolist()}
    except Asked:
        ((back_end, device_id),) = calls
        return {"calls": [back_end], "device_id": str(device_id)}
    except smp.ConfigError as error:
        return {"refused": str(error)}
    finally:
        smp.shutdown()


def main() -> None:
    for name, (asked, devices) in STARTS.items():
        print(json.dumps({"name": name, **start(asked, devices[int(os.environ["RANK"])])}), flush=True)


if __name__ == "__main__":
    main()
