"""Fails in many ways, one after another, catches it on every rank, and trains on."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import common
import shardwright as smp
import torch
from common import ScriptError, fault, raise_script_error, say


class Unknown:
    """A type that the library does not know."""


@smp.step
def other_function(model: Any, inputs: Any) -> Any:
    loss = model(inputs).abs().mean()
    model.backward(loss)
    return loss


class Scenarios:
    """Each returns the step that fails."""

    def __init__(self, job: common.TrainingJob) -> None:
        self.job = job

    def at(self, name: str, phase: str, visit: int = 2) -> Callable[[], Any]:
        fault.arm(name, phase, raise_script_error, visit)
        return self.job.step

    def only_on(self, rank: int, step: Callable[[], Any]) -> Callable[[], Any]:
        if smp.rank() != rank:
            fault.disarm()
        return step

    def indivisible(self) -> Any:
        return self.job.train(self.job.model, torch.zeros(common.BATCH + 1, common.WIDTH, dtype=torch.float64))

    def unknown_argument(self) -> Callable[[], Any]:
        fault.arm("net", "argument", Unknown)
        return self.job.step

    def unknown_result(self) -> Callable[[], Any]:
        fault.arm("second", "forward", Unknown)
        fault.arm("third", "forward", Unknown)
        return self.job.step

    def different_functions(self) -> Any:
        function = other_function if smp.rank() == 1 else self.job.train
        return function(self.job.model, self.job.draw()[smp.dp_rank()])

    def gradient_hook(self) -> Any:
        """Fails after all tasks, when only the ranks' votes are missing."""
        parameters = list(self.job.model.local_parameters())

        def hook(gradient: torch.Tensor) -> None:
            raise_script_error()

        handle = parameters[0].register_hook(hook) if smp.rank() == 1 else None
        try:
            return self.job.step()
        finally:
            if handle is not None:
                handle.remove()

    def shutdown_in_a_forward(self) -> Any:
        fault.arm("second", "forward", smp.shutdown)
        return self.job.step()

    def shutdown_in_a_signal_handler(self) -> Any:
        """On rank 1's main thread, which waits, while a worker of it runs the module."""

        def interrupt() -> None:
            os.kill(os.getpid(), signal.SIGALRM)
            time.sleep(1.0)  # in which the main thread notices it

        before = signal.signal(signal.SIGALRM, lambda *_: smp.shutdown())
        fault.arm("second", "forward", interrupt)
        try:
            return self.job.step()
        finally:
            signal.signal(signal.SIGALRM, before)

    def all(self) -> dict[str, Callable[[], Any]]:
        steps: dict[str, Callable[[], Any]] = {
            "forward on rank 1": lambda: self.at("second", "forward")(),
            "forward on rank 0": lambda: self.at("first", "forward")(),
            "forward of a child called back": lambda: self.at("inner", "forward")(),
            "backward on rank 1": lambda: self.at("second", "backward")(),
            "backward on rank 0": lambda: self.at("first", "backward")(),
            "backward of a child called back": lambda: self.at("inner", "backward")(),
            "last backward on rank 0": lambda: self.at("first", "backward", common.MICROBATCHES)(),
            "step function": lambda: self.at("step function", "forward")(),
            "step function after its backward": lambda: self.at("step function", "after backward")(),
        }
        if smp.size() == 2:
            steps |= {
                "indivisible batch": self.indivisible,
                "unknown argument": lambda: self.unknown_argument()(),
                "unknown result": lambda: self.unknown_result()(),
                "different functions": self.different_functions,
                "hook of a parameter": self.gradient_hook,
                "shutdown in a forward": self.shutdown_in_a_forward,
                "shutdown in a signal handler": self.shutdown_in_a_signal_handler,
            }
            return steps
        chosen = ("forward on rank 1", "backward on rank 1", "last backward on rank 0", "step function")
        return {
            f"{name}, replica {replica}": lambda name=name, replica=replica: self.only_replica(replica, steps[name])
            for name in chosen
            for replica in (0, 1)
        }

    def only_replica(self, replica: int, step: Callable[[], Any]) -> Any:
        if smp.dp_rank() == replica:
            return step()
        fault.disarm()
        return self.job.step()


def main() -> None:
    job = common.start(ddp=int(os.environ["WORLD_SIZE"]) > 2, model_options={"bucket_cap_mb": 0.0004})
    say("exact", name="first step", error=job.exact_step())
    scenarios = Scenarios(job)
    for name, step in scenarios.all().items():
        before = job.state()
        began = time.monotonic()
        try:
            step()
        except Exception as error:
            failure = common.describe(error)
        else:
            failure = None
        seconds = time.monotonic() - began
        fault.disarm()
        same = all(torch.equal(a, b) for a, b in zip(before, job.state(), strict=True))
        live = smp.stats()["live_frames"]
        say("failed", name=name, failure=failure, seconds=seconds, restored=same, live_frames=live)
        say("exact", name=f"after {name}", error=job.exact_step())
    say("end", host=socket.gethostname(), own=ScriptError.__name__)


if __name__ == "__main__":
    main()
