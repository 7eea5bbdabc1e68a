"""Threads that a forward starts itself."""

from __future__ import annotations

import contextvars
import threading
from typing import Any

import shardwright as smp
import torch
from shardwright.errors import FrameError, RemoteError
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.job import Job, job_fixture

job = job_fixture(2)


class Starting(nn.Module):
    """Runs a module in a thread of its own, whose error it raises."""

    def __init__(self, inside: str) -> None:
        super().__init__()
        self.here, self.there = nn.Linear(3, 3), nn.Linear(3, 3)
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: list[Any] = []

        def run() -> None:
            try:
                found.append(self.get_submodule(self.inside)(x))
            except FrameError as error:
                found.append(error)

        y = self.there(self.here(x))
        thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="prefetch")
        thread.start()
        thread.join()
        if isinstance(found[0], FrameError):
            raise found[0]
        result: torch.Tensor = y + found[0]
        return result


def trained(job: Job, inside: str) -> list[Any]:
    def main(runtime: Runtime) -> torch.Tensor | None:
        torch.manual_seed(0)
        module = Starting(inside)
        smp.set_partition(module.there, 1)
        model = smp.DistributedModel(module)

        @smp.step
        def train(inputs: torch.Tensor) -> None:
            model.backward(model(inputs).sum())

        train(torch.ones(4, 3))
        return module.here.weight.grad

    return job.run(main, {"microbatches": 2, "auto_partition": False, "default_partition": 0})


def test_a_call_of_a_module_elsewhere_in_a_thread_of_the_script_is_refused_with_the_thread(job: Job) -> None:
    for error in trained(job, "there"):
        assert isinstance(error, (FrameError, RemoteError))
        assert "module 'there', which rank 1 owns, was called in thread 'prefetch'" in str(error)
        assert "the thread that runs the microbatch" in str(error)
        assert "outside a step" not in str(error)


def test_a_call_of_a_module_here_in_a_thread_of_the_script_is_exact(job: Job) -> None:
    torch.manual_seed(0)
    plain = Starting("here")
    (plain(torch.ones(4, 3)).sum() / 2).backward()
    torch.testing.assert_close(trained(job, "here")[0], plain.here.weight.grad)
