"""A rank that trains a GPT-2 whose blocks are checkpointed, and measures its peak of memory.

usage: peak.py OFFLOAD
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import shardwright as smp
import torch
from shardwright.job.runtime import current_runtime
from shardwright.offloading import OffloadedActivations, activations
from transformers import GPT2Config, GPT2LMHeadModel

#: So many microbatches that what the process itself gains and frees meanwhile is little beside them.
BLOCKS, WIDTH, LENGTH, ROWS, MICROBATCHES = 12, 64, 64, 32, 16
#: Of one block in one microbatch.
NBYTES = ROWS * LENGTH * WIDTH * 4
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENAS = -3, -1, -8


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) * 1024


def main() -> None:
    # Freed memory goes back to the system at once, so that resident memory is what is in use; the library leaves it so.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    mallopt = ctypes.CDLL(None).mallopt
    assert all(
        mallopt(what, value) for what, value in ((_MMAP_THRESHOLD, 65536), (_TRIM_THRESHOLD, 65536), (_ARENAS, 2))
    )
    activations.MOST_OUTGOING_BYTES = NBYTES
    offload = {"false": False, "disk": "disk"}[sys.argv[1]]
    # All forwards come before all backwards, so that everything is kept at once.
    keys = {"pipeline_parallel_degree": 2, "microbatches": MICROBATCHES, "pipeline": "simple", "auto_partition": False}
    smp.init({**keys, "default_partition": 0, "offload_activations": offload, "activation_loading_horizon": 2})
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"n_layer": BLOCKS, "n_embd": WIDTH, "n_head": 2, "n_positions": LENGTH, "vocab_size": 32}
    network = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))
    for index, block in enumerate(network.transformer.h):
        smp.set_partition(block, index * 2 // BLOCKS)
        smp.set_activation_checkpointing(block)
    model = smp.DistributedModel(network)

    @smp.step
    def train(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        model.backward(loss)
        return loss

    ids = torch.randint(32, (ROWS * MICROBATCHES, LENGTH))
    train(ids[:MICROBATCHES])  # the first step divides the model
    Path("/proc/self/clear_refs").write_text("5")
    idle = status("VmRSS")
    loss = train(ids)
    offloaded = current_runtime().find(OffloadedActivations)
    found = {
        "peak": status("VmHWM") - idle,
        "checkpointed_bytes": NBYTES * MICROBATCHES * BLOCKS // 2,
        "loss": loss.stack().tolist(),
        "counts": {} if offloaded is None else dict(offloaded.counts()),
    }
    print("found: " + json.dumps(found), flush=True)
    smp.shutdown()


if __name__ == "__main__":
    main()
