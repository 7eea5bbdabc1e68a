"""A rank of a job in which all tp ranks bring the same samples, so that shapes are known from step to step.

``known.py PP BACK_END``; the tensor parallelism degree is 2, the back end ``messages`` or, as over several hosts,
``process_group``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import shardwright as smp
import torch
from job import compare, data, make
from shardwright import process_groups
from shardwright.tensor_parallel.back_ends.process_group import ByProcessGroup
from shardwright.tensor_parallel.group import current_tensor_group


def refused(call: Callable[[], object]) -> None:
    try:
        call()
    except (smp.ShardwrightError, smp.RemoteError) as problem:
        print("refused:", str(problem).replace("\n", " "))
    else:
        raise AssertionError("the step has succeeded")


def main() -> None:
    torch.set_default_dtype(torch.float64)
    pipeline = int(sys.argv[1])
    if sys.argv[2] == "process_group":
        process_groups._tensor_back_end = lambda runtime, group, messages: ByProcessGroup.of_rank(runtime, group)
    smp.init(
        {
            "pipeline_parallel_degree": pipeline,
            "tensor_parallel_degree": 2,
            "ddp": True,
            "prescaled_batch": True,
            "microbatches": 2,
        }
    )
    model, whole = smp.DistributedModel(make(divided=True)), make(divided=False)
    group = current_tensor_group()
    assert type(group._back_end).__name__ == {"messages": "ByMessages", "process_group": "ByProcessGroup"}[sys.argv[2]]

    @smp.step
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - y).square().mean()
        model.backward(loss)
        return loss

    def exact(step: int, rows: int) -> tuple[int, int]:
        """A step beside one process: how often this rank waited for shapes of modules, and how often it did not."""
        group.counts.clear()
        x, y = (one[:rows] for one in data(step, 0))
        model.zero_grad()
        whole.zero_grad()
        train(x, y)
        sum((whole(part) - of).square().mean() / 2 for part, of in zip(x.chunk(2), y.chunk(2), strict=True)).backward()
        compare(model, whole, f"step {step}")
        waited, went_on = (group.counts[kind].number if kind in group.counts else 0 for kind in ("agree", "as_before"))
        # A pipeline of one rank compares places too: at each backward, and where the step function ends.
        return waited - (3 if pipeline == 1 else 0), went_on

    exact(0, 4)  # which also places modules
    divided = sum(name.endswith("divided.weight") for name, _ in model.local_named_parameters())
    calls = 2 * divided
    for step in (1, 2):
        assert exact(step, 4) == (0, calls), "what is known is not waited for"
    odd = smp.tp_rank() == 1
    refused(lambda: train(*(one[: 2 if odd else 4] for one in data(3, 0))))
    assert exact(4, 4) == (divided, calls - divided), "after a failed step all is asked anew"
    model.module[1].skips = odd
    refused(lambda: train(*data(5, 0)))
    model.module[1].skips = False
    assert exact(6, 2) == (divided, calls - divided)
    assert exact(7, 4) == (divided, calls - divided), "a change on all ranks is agreed"
    assert exact(8, 4) == (0, calls)
    smp.shutdown()
    print("exact")


if __name__ == "__main__":
    main()
