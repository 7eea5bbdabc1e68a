"""One of two ranks that generate, or one process that does.

usage: python -m benches.generate.rank sleeping|gpt2 MICROBATCHES TOKENS [alone]; rank 0 prints JSON
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import shardwright as smp
import torch
from shardwright.caches import CacheTable
from shardwright.job.runtime import current_runtime

from benches.generate.models import BATCH, PROMPT, Watch, beginnings, generated, made


def _bytes_of_layer(config: Any, tokens: int) -> int:
    """What a layer of a cache holds at the end, for the whole batch."""
    return int(2 * BATCH * (PROMPT + tokens - 1) * config.n_embd * torch.finfo(torch.float32).bits // 8)


def _alone(kind: str, tokens: int) -> dict[str, Any]:
    model = made(kind)
    ids = beginnings(model)
    generated(model, ids, 2)
    watch = Watch(model)
    found, seconds, computed = generated(model, ids, tokens)
    return {"seconds": seconds, "computed": computed, "tokens": _digest(found), "growth": watch.growth()}


def _over_ranks(kind: str, microbatches: int, tokens: int) -> dict[str, Any]:
    keys = {"pipeline_parallel_degree": 2, "microbatches": microbatches, "auto_partition": False}
    smp.init({**keys, "default_partition": 0})
    module = made(kind)
    blocks = list(module.transformer.h)
    for block in blocks[len(blocks) // 2 :]:
        smp.set_partition(block, 1)
    ids, config = beginnings(module), module.config
    model = smp.DistributedModel(module)
    generated(model, ids, 2)
    held = [0]

    def look(*_: Any) -> None:
        held[0] = max(held[0], sum(one.nbytes for one in current_runtime()[CacheTable].contents()))

    own = blocks[: len(blocks) // 2] if smp.rank() == 0 else blocks[len(blocks) // 2 :]
    own[-1].register_forward_hook(look)
    watch = Watch(module)
    smp.barrier()
    found, seconds, computed = generated(model, ids, tokens)
    of_ranks = smp.allgather((held[0], len(own), computed), smp.WORLD)
    at_once = sum(one[0] for one in of_ranks)  # sequences of all microbatches need not be there at a time
    assert at_once <= len(blocks) * _bytes_of_layer(config, tokens)
    shares = [one[0] / (at_once * one[1] / len(blocks)) for one in of_ranks]
    assert not current_runtime()[CacheTable].ids, "nothing is left after a generation"
    growth = watch.growth() if smp.rank() == 0 else None
    smp.shutdown()
    return {
        "seconds": seconds,
        "tokens": _digest(found),
        "growth": growth,
        "shares": shares,
        "computed": max(one[2] for one in of_ranks),
    }


def _digest(tokens: torch.Tensor) -> str:
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()


def main() -> None:
    kind, microbatches, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    found = _alone(kind, tokens) if "alone" in sys.argv else _over_ranks(kind, microbatches, tokens)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
