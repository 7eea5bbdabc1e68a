"""One rank of a small pipeline that takes many steps and tells what is left after each."""

import gc
import json
import sys

import shardwright as smp
import torch
from shardwright import start
from torch import nn


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def main(steps: int) -> None:
    start._TRACE_CAPACITY = 256  # the ring of trace records would fill for thousands of steps, and hide a leak
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]
    module = nn.Sequential(*layers)
    for index in range(4, 8):
        smp.set_partition(module[index], 1)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    @smp.step
    def train(model, inputs):
        outputs = model(inputs)
        loss = outputs.square().mean()
        model.backward(loss)
        return loss, outputs

    inputs = torch.randn(1024, 64)  # outputs large enough to be fetched by rank 1 only where it uses them
    resident, live = [], set()
    for step in range(steps):
        optimizer.zero_grad()
        loss, outputs = train(model, inputs)
        loss.reduce_mean().item()
        if step % 100 == 0:
            outputs.concat()
        optimizer.step()
        if step % 50 == 49:
            del loss, outputs
            gc.collect()
            smp.barrier()
            now = smp.stats()
            live.add((now["live_frames"], now["server"]["live_requests"]))
            resident.append(resident_bytes())
    smp.barrier()
    now = smp.stats()["communication"]
    left = now["objects_kept_for_others"] + now["objects_waiting"]
    print(json.dumps({"rank": smp.rank(), "resident": resident, "live": sorted(live), "left": left}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
