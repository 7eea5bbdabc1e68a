"""What smp.trace costs: steps with the trace on and off in turns, on two ranks, and how many records a step leaves.

Two models: a GPT-2, whose ratio counts, and a module that is called 200 times in a step and does nothing, where almost
all the time goes into messages and so into records.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import shardwright as smp
import torch
from torch import nn

from benches.call.rank import Caller
from benches.ranks import result_of_pair

#: The most that a step may take with the trace on, as a multiple of one with the trace off.
BAR = 1.01
CALLS = 200
#: Fresh jobs that each take a share of the pairs, because where a process's memory lies moves all of its figures.
JOBS = 3


def make_gpt2() -> tuple[nn.Module, torch.Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256, n_positions=64, n_embd=160, n_layer=4, n_head=5, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config), torch.randint(256, (16, 64))


def gpt2_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def make_calls() -> tuple[nn.Module, torch.Tensor]:
    return Caller(CALLS), torch.ones(4, 4)


def calls_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).sum()
    return loss


def traced_steps(pairs: int) -> set[int]:
    """The steps of the pairs that are traced: the first of each even pair, the second of each odd one."""
    return {2 * pair + pair % 2 for pair in range(pairs)}


def measure(make: Callable[[], Any], loss_of: Callable[..., torch.Tensor], pairs: int) -> dict[str, Any]:
    """Seconds of the steps of each pair (off, on), and the records of a step, on a rank of a job."""
    torch.manual_seed(0)
    module, batch = make()
    model = smp.DistributedModel(module)

    @smp.step
    def train_step(model: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, batch)
        model.backward(loss)
        return loss

    def timed() -> float:
        model.zero_grad()
        smp.barrier()
        start = time.perf_counter()
        train_step(model, batch)
        return time.perf_counter() - start

    for _ in range(5):
        timed()
    on = traced_steps(pairs)
    with smp.trace(steps=on) as traced:
        seconds = [timed() for _ in range(2 * pairs)]
    found = [
        (seconds[2 * pair + 1], seconds[2 * pair]) if 2 * pair in on else (seconds[2 * pair], seconds[2 * pair + 1])
        for pair in range(pairs)
    ]
    records = 0 if traced.timeline is None else len(traced.timeline.records()) / max(1, len(traced.timeline.steps()))
    return {"pairs": found, "records": records}


def run_rank(pairs: int) -> None:
    smp.init({"pipeline_parallel_degree": 2, "microbatches": 4})
    found = {"GPT-2": measure(make_gpt2, gpt2_loss, pairs), f"{CALLS} calls": measure(make_calls, calls_loss, pairs)}
    if smp.rank() == 0:
        print(json.dumps(found))
    smp.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-trace", description=__doc__)
    parser.add_argument("--pairs", type=int, default=100, help=f"of steps of each model, over {JOBS} jobs")
    parser.add_argument("--rank", action="store_true", help="be a rank of a job")
    args = parser.parse_args()
    if args.rank:
        run_rank(args.pairs)
        return 0
    if args.pairs < JOBS:
        parser.error(f"--pairs is {args.pairs}; each of the {JOBS} jobs needs one")
    shares = [args.pairs // JOBS + (index < args.pairs % JOBS) for index in range(JOBS)]
    command = ["-m", "benches.tracing", "--rank", "--pairs"]
    jobs = [result_of_pair([*command, str(share)], 600.0) for share in shares]
    print(f"{'model':12}{'off ms':>10}{'on ms':>10}{'ratio':>9}{'its quartiles':>17}{'records a step':>16}")
    ratios = {}
    for name in jobs[0]:
        pairs = [pair for job in jobs for pair in job[name]["pairs"]]
        off, on = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
        low, ratios[name], high = statistics.quantiles([traced / plain for plain, traced in pairs], n=4)
        spread = f"{low:.4f}-{high:.4f}"
        print(f"{name:12}{off:10.3f}{on:10.3f}{ratios[name]:9.4f}{spread:>17}{jobs[0][name]['records']:16.0f}")
    missed = ratios["GPT-2"] > BAR
    if missed:
        print(f"missed: a step of GPT-2 takes {ratios['GPT-2']:.4f} times as long; the bar is {BAR:g}")
    print(json.dumps({"trace_ratio": ratios["GPT-2"], "calls_ratio": ratios[f"{CALLS} calls"], "pairs": args.pairs}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
