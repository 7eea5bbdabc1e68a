"""What is asked of the library on a device with an index and a thread of autograd, in a process of its own.

Run with the names of scenarios; each prints a line of JSON. `test_python_device.py` says what they have to be.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

from tests.device.python_device import NAME, install

DEVICE = install()

import shardwright as smp  # noqa: E402
import torch  # noqa: E402
from shardwright.delayed.shapes import ShapeTensor  # noqa: E402
from shardwright.delayed.tensor import DelayedTensor  # noqa: E402
from shardwright.execution.task import running_task  # noqa: E402
from shardwright.frames.remote import is_remote  # noqa: E402
from shardwright.job.place import Place  # noqa: E402
from shardwright.job.runtime import Runtime  # noqa: E402
from shardwright.model.sentinel import ReleasedParameter, is_sentinel  # noqa: E402
from shardwright.partition import decide  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from tests.frames.job import Job, in_process_ranks  # noqa: E402

#: Larger than what comes with an answer, so that results stay on the rank that made them.
WIDTH, ROWS, MICROBATCHES = 64, 64, 4
SETTINGS = {"microbatches": MICROBATCHES, "auto_partition": False, "default_partition": 0}


#: Threads and tasks of backwards, and devices of remote results: not in modules, which would be state to the library.
NOTES: list[tuple[str, list[int] | None]] = []
DEVICES: list[str] = []


class Noting(torch.autograd.Function):
    """The identity; its backward notes on which thread it runs, and in whose name."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        task = running_task()
        NOTES.append(
            (threading.current_thread().name, None if task is None else [task.runtime.place.rank, task.microbatch])
        )
        return gradients[0]


class Late(torch.autograd.Function):
    """The identity, whose backward uses a tensor that its forward did not look at."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, late: list[torch.Tensor]) -> torch.Tensor:
        ctx.late = late
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * (1 + ctx.late[0].mean()), None


class Net(nn.Module):
    """A head here, a body and a tail there, a foot here."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.foot = nn.Linear(WIDTH, WIDTH)
        self.tail = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = Noting.apply(self.head(x))  # type: ignore[no-untyped-call]
        y = self.body(x)
        DEVICES.append(("remote " if is_remote(y) else "") + str(y.device))
        z = self.tail(y)
        result: torch.Tensor = checkpoint(self.twice, z, use_reentrant=False)
        DEVICES.append(str(z.device))
        return Late.apply(result, [y])  # type: ignore[no-untyped-call,no-any-return]

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return Noting.apply(self.foot(x).sin())  # type: ignore[no-untyped-call]


def net(device: torch.device) -> Net:
    torch.manual_seed(0)
    made = Net()
    if device.type != "cpu":  # `to` would replace the parameters
        for module in made.children():
            for name, parameter in list(module.named_parameters()):
                setattr(module, name, nn.Parameter(parameter.detach().to(device)))
    return made


def batch(device: torch.device) -> torch.Tensor:
    return torch.randn(MICROBATCHES * ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)


def expected() -> dict[str, torch.Tensor]:
    model = net(torch.device("cpu"))
    for part in batch(torch.device("cpu")).chunk(MICROBATCHES):
        (model(part).square().mean() / MICROBATCHES).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def train(job: Job, settings: dict[str, Any], steps: int = 1) -> list[Any]:
    """Train on two ranks, with the body on the second; the gradients of each."""

    def main(runtime: Runtime) -> dict[str, Any]:
        module = net(DEVICE)
        smp.set_partition(module.body, 1)
        smp.set_partition(module.tail, 1)
        model = smp.DistributedModel(module)

        @smp.step
        def step(inputs: torch.Tensor) -> None:
            model.backward(model(inputs).square().mean())

        for _ in range(steps):
            model.zero_grad()
            step(batch(DEVICE))
        gradients = {name: each.grad.cpu() for name, each in model.local_named_parameters() if each.grad is not None}
        return gradients

    return job.run(main, {**SETTINGS, **settings})


def gradients_of(job: Job) -> dict[str, Any]:
    """Two ranks on the device beside one process on the CPU, with every kind of handle and prediction."""
    found: dict[str, Any] = {}
    right = expected()
    for name, settings, steps in (
        ("dynamic", {"tensor_handles": True}, 1),
        ("static", {"static_mode": True}, 4),
        ("fast", {"static_mode": True, "fast_mode": True}, 4),
    ):
        NOTES.clear()
        DEVICES.clear()
        ranks = train(job, settings, steps)
        if errors := [repr(rank) for rank in ranks if isinstance(rank, BaseException)]:
            found[name] = errors
            continue
        gradients = {key: value for rank in ranks for key, value in rank.items()}
        worst = max(float((gradients[key] - value).abs().max()) for key, value in right.items())
        found[name] = {
            "worst": worst,
            "devices": sorted({*DEVICES}),
            "threads": sorted({thread.rstrip("-0123456789") for thread, _ in NOTES}),
            "tasks": sorted({json.dumps(task) for _, task in NOTES}),
        }
    return found


def placeholders(job: Job) -> dict[str, list[str]]:
    """The device of everything that stands for a tensor without having memory, made on a device without an index."""
    bare = torch.device(NAME)

    def main(runtime: Runtime) -> dict[str, list[str]]:
        module = net(DEVICE)
        smp.set_partition(module.body, 1)
        smp.set_partition(module.tail, 1)
        handed_out = list(module.parameters())
        model = smp.DistributedModel(module)

        @smp.step
        def step(inputs: torch.Tensor) -> None:
            model.backward(model(inputs).square().mean())

        step(batch(DEVICE))
        sentinels = [each for each in module.parameters() if is_sentinel(each)]
        released = [each for each in handed_out if isinstance(each, ReleasedParameter)]
        moved = [each.to(bare) for each in (*sentinels, *released)]
        return {
            "sentinels": [str(each.device) for each in sentinels],
            "released": [str(each.device) for each in released],
            "moved": [str(each.device) for each in moved],
        }

    found: dict[str, list[str]] = {}
    for rank in job.run(main, SETTINGS):
        if isinstance(rank, BaseException):
            raise rank
        for kind, devices in rank.items():
            found.setdefault(kind, []).extend(devices)
    with smp.delay_param_initialization():
        delayed = [*nn.Linear(2, 2, device=bare).parameters(), torch.randn(2, device=bare)]
        delayed.append(delayed[0].to(bare, torch.float64))
    found["delayed"] = [str(each.device) for each in delayed if isinstance(each, DelayedTensor)]
    shape = ShapeTensor(torch.empty(2, device="meta"), bare)
    found["shapes"] = [str(each.device) for each in (shape, shape + 1, torch.ones_like(shape, device=bare))]
    return found


SCENARIOS: dict[str, Callable[[Job], Any]] = {"gradients": gradients_of, "placeholders": placeholders}


def main(names: list[str]) -> None:
    """Run the scenarios on two ranks, whose device is this one; a model is traced where it lies."""
    decide.choose_device = lambda module, trace_device: DEVICE
    Place.device = property(lambda self: DEVICE)  # type: ignore[assignment, method-assign]
    with in_process_ranks():
        job = Job(2)
        for name in names:
            print(json.dumps({"scenario": name, "found": SCENARIOS[name](job)}), flush=True)
        job.close()


if __name__ == "__main__":
    main(sys.argv[1:])
