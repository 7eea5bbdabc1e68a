"""Leaves its job, and says what of the process was put back."""

from __future__ import annotations

import gc
import signal
import sys
import weakref

import shardwright as smp
import torch
from common import say
from shardwright.job.runtime import current_runtime


def main() -> None:
    functions = (torch.nn.Module.__setattr__, torch.Tensor.register_hook, torch.optim.Optimizer.zero_grad)
    before = sys.excepthook, signal.getsignal(signal.SIGTERM), functions
    chained = []
    for _ in range(2):
        smp.init({"pipeline_parallel_degree": 2})
        runtime = weakref.ref(current_runtime())
        ours = sys.excepthook
        assert ours != before[0]

        def in_front(*what: object, behind: object = ours) -> None:
            chained.append(what)
            behind(*what)  # type: ignore[operator]

        sys.excepthook = in_front
        smp.shutdown()
        assert sys.excepthook is in_front, "the script's own stays"
        error = ValueError("after the end")
        sys.excepthook(ValueError, error, None)
        sys.excepthook = before[0]
        gc.collect()
        assert runtime() is None, "nothing keeps a rank that has left"
    functions = (torch.nn.Module.__setattr__, torch.Tensor.register_hook, torch.optim.Optimizer.zero_grad)
    smp.init({"pipeline_parallel_degree": 2})
    smp.shutdown()
    after = sys.excepthook, signal.getsignal(signal.SIGTERM), functions
    say("left", same=after == before, chained=len(chained))


if __name__ == "__main__":
    main()
