"""Tensors between two ranks: that they arrive, by which routes, and how fast."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore

from tools.gpu_day.options import Options
from tools.gpu_day.ranks import results_of_ranks
from tools.gpu_day.steps.ceilings import device_copy_gb_s

_ROUNDS = 60
#: Tensors on their way at once; together they fit into the buffer.
_AT_ONCE = 2
#: A tensor is copied twice: into its sender's buffer, and by its receiver out of that.
_COPIES = 2
#: The least that these copies together may reach of the rate of copies within the device's memory.
SHARE = 0.4


def exchange(options: Options) -> dict[str, Any]:
    """One of two ranks of the job of the tests: tensors of three sizes to and fro, each of which is looked at."""
    from tests.device import transfer_job

    rank = int(os.environ["RANK"])
    place = "127.0.0.1", int(os.environ["MASTER_PORT"])
    store = TCPStore(*place, 2, is_master=rank == 0, timeout=timedelta(seconds=30))
    port = 0 if rank == 0 else int(store.get("port"))
    library = options.rehearsal or ""
    found = transfer_job.exchange(rank, port, library, _ROUNDS, lambda port: store.set("port", str(port)))
    store.set(f"done {rank}", "")
    if rank == 0:
        store.wait(["done 1"])
    return found


def rate(options: Options) -> dict[str, Any]:
    """One of two ranks: large tensors from rank 0 to rank 1 and back."""
    import shardwright as smp

    smp.init({"pipeline_parallel_degree": 2})
    rank, world = int(os.environ["RANK"]), smp.RankType.WORLD_RANK
    numbers = (1 << 18) if options.tiny else (16 << 20)
    rounds = 4 if options.tiny else 20
    tensors = [torch.full((numbers,), float(rank), device=options.device) for _ in range(_AT_ONCE)]

    def turn() -> None:
        if rank == 0:
            for tensor in tensors:
                smp.send(tensor, 1, world)
            received = [smp.recv_from(1, world) for _ in tensors]
        else:
            received = [smp.recv_from(0, world) for _ in tensors]
            for tensor in tensors:
                smp.send(tensor, 0, world)
        for tensor in received:
            if float(tensor[-1]) != 1.0 - rank:
                raise RuntimeError(f"{tensor} came instead of {1 - rank}")

    for _ in range(3):  # both ranks open one another's memory
        turn()
    before = smp.comm_stats()["routes"]
    began = time.perf_counter()
    for _ in range(rounds):
        turn()
    seconds = time.perf_counter() - began
    stats = smp.comm_stats()
    sent = {name: route["bytes_sent"] - before[name]["bytes_sent"] for name, route in stats["routes"].items()}
    smp.barrier()
    return {
        "gb_s": 2 * rounds * _AT_ONCE * tensors[0].nbytes / seconds / 1e9,
        "bytes_by_route": {name: count for name, count in sent.items() if count},
        "devices": stats["peers"][1 - rank]["devices"],
        "fallbacks": stats["fallbacks"],
    }


def run(options: Options) -> dict[str, Any]:
    """Exchange and time; it passes if all arrived, on one device by copies within it, at a share of its rate."""
    from tests.device.test_transfers import check

    exchanged = results_of_ranks(exchange, options, seconds=30)
    check(exchanged, _ROUNDS)
    found: dict[str, Any] = {f"exchange_{name}": value for name, value in exchanged[0].items()}
    first, _ = results_of_ranks(rate, options, seconds=30)
    found |= {f"large_{name}": value for name, value in first.items()}
    if options.device == "cpu":
        return {"passed": set(first["bytes_by_route"]) == {"shared_memory"}, **found}
    found["device_copy_gb_s"] = device_copy_gb_s(options.device, options.tiny)
    found["share_of_copy_rate"] = _COPIES * first["gb_s"] / found["device_copy_gb_s"]
    is_routed = set(first["bytes_by_route"]) == {"peer_copy"}
    return {
        "passed": is_routed and found["share_of_copy_rate"] >= SHARE,
        "bars": {"share_of_copy_rate": SHARE},
        **found,
    }
