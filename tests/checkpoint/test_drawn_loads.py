"""Loads, state dicts, averages, reads, writes, steps and failing steps in drawn orders, beside one plain process.

A load that waits for the first step of a pipeline either has reached the weights before anybody reads or changes them,
or that is refused; nothing goes around it. Ranks are threads of one process.
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import Runtime
from shardwright.model.sentinel import is_sentinel
from shardwright.model.updates import Updates
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.frames.job import Job, job_fixture

DRAWS = 240
WIDTH = 3
ACTIONS = (
    *("resume", "load", "state", "read", "write", "raw_write"),
    *("average", "average_state", "average_load", "applied", "evaluate", "train", "train", "save", "get_module"),
    *("fail", "fail_early"),
)


class Net(nn.Module):
    """Two layers, of which each rank gets one, and a buffer that counts."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.last = nn.Linear(WIDTH, 1, dtype=torch.float64)
        self.register_buffer("scale", torch.full((1,), 1.0 + seed, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(inputs).tanh()) * self.scale


def samples(number: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def trained(seed: int, steps: int = 2) -> tuple[Net, torch.optim.Optimizer]:
    net = Net(seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for number in range(steps):
        optimizer.zero_grad()
        net(samples(number)).square().mean().backward()
        optimizer.step()
    return net, optimizer


#: What is saved in a checkpoint, and what state dicts hold.
SAVED, SAVED_OPTIMIZER = trained(1)
OTHER = trained(2)[0].state_dict()
AVERAGED = AveragedModel(trained(3)[0], multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
AVERAGED.update_parameters(trained(4)[0])


class Plain:
    """One process of plain PyTorch."""

    def __init__(self) -> None:
        self.net = Net(7)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.averages = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)

    def do(self, action: str, number: int) -> Any:
        if action == "resume":
            self.net.load_state_dict(SAVED.state_dict())
            self.optimizer.load_state_dict(copy.deepcopy(SAVED_OPTIMIZER.state_dict()))
        elif action == "load":
            self.net.load_state_dict(OTHER)
        elif action in ("write", "raw_write"):
            with torch.no_grad():
                for parameter in self.net.parameters():
                    parameter.mul_(0.5)
        elif action == "average":
            self.averages.update_parameters(self.net)
        elif action == "average_state":
            return {name: value.clone() for name, value in self.averages.state_dict().items()}
        elif action == "average_load":
            self.averages.load_state_dict(AVERAGED.state_dict())
        elif action == "applied":
            with torch.no_grad():
                return {"loss": self.averages.module(samples(number)).square().mean()}
        elif action == "evaluate":
            with torch.no_grad():
                return {"loss": self.net(samples(number)).square().mean()}
        elif action == "train":
            self.optimizer.zero_grad()
            loss = self.net(samples(number)).square().mean()
            loss.backward()
            self.optimizer.step()
            return {"loss": loss.detach()}
        elif action in ("state", "read", "get_module"):
            return {name: value.clone() for name, value in self.net.state_dict().items()}
        return None


@smp.step
def evaluated(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).square().mean()


@smp.step
def stepped(model: smp.DistributedModel, inputs: torch.Tensor) -> torch.Tensor:
    loss = model(inputs).square().mean()
    model.backward(loss)
    return loss


@smp.step
def failing_early(model: smp.DistributedModel, inputs: torch.Tensor) -> torch.Tensor:
    model(inputs[:, :-1])  # which the model does not take


@smp.step
def failing(model: smp.DistributedModel, inputs: torch.Tensor) -> torch.Tensor:
    loss = model(inputs).square().mean()
    model.backward(loss)
    raise ValueError("on purpose")


class Divided:
    """The same over a pipeline of two ranks; one of these for each."""

    def __init__(self, runtime: Runtime, checkpoint: Path, folder: Path) -> None:
        self.rank, self.checkpoint, self.folder = runtime.place.rank, checkpoint, folder
        self.net = Net(7)
        smp.set_partition(self.net.last, 1)
        self.model = smp.DistributedModel(self.net)
        self.optimizer = smp.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9))
        self.averages = smp.AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)

    def do(self, action: str, number: int) -> Any:
        model = self.model
        if action == "resume":
            smp.resume_from_checkpoint(self.checkpoint, "saved", model=model, optimizer=self.optimizer)
        elif action == "load":
            model.load_state_dict(OTHER)
        elif action == "write":
            with torch.no_grad():
                for parameter in model.local_parameters():
                    parameter.mul_(0.5)
        elif action == "raw_write":
            with torch.no_grad():
                for parameter in own(self.net):
                    parameter.mul_(0.5)
        elif action == "average":
            self.averages.update_parameters()
        elif action == "average_state":
            return self.averages.state_dict()
        elif action == "average_load":
            self.averages.load_state_dict(AVERAGED.state_dict())
        elif action == "applied":
            with self.averages.applied(), torch.no_grad():
                return self._loss(evaluated(model, samples(number)))
        elif action == "evaluate":
            with torch.no_grad():
                return self._loss(evaluated(model, samples(number)))
        elif action == "train":
            self.optimizer.zero_grad()
            loss = stepped(model, samples(number))
            self.optimizer.step()
            return self._loss(loss)
        elif action == "fail":  # changes nothing, although the first step divides the model
            with pytest.raises((ValueError, smp.RemoteError)) as caught:
                failing(model, samples(number))
            if "on purpose" not in str(caught.value):
                raise caught.value
        elif action == "fail_early":  # before a model is divided
            with pytest.raises((RuntimeError, smp.RemoteError)) as caught:
                failing_early(model, samples(number))
            if "shapes cannot be multiplied" not in str(caught.value):
                raise caught.value
        elif action == "state":
            return model.state_dict()
        elif action == "read":
            found = (*model.local_named_parameters(), *model.local_named_buffers())
            return {name: value.detach().clone() for name, value in found}
        elif action == "get_module":
            module = model.get_module()
            return {name: one.detach().clone() for name, one in module.named_parameters() if not is_sentinel(one)}
        elif action == "save":
            smp.save_checkpoint(self.folder, f"draw{number}", model=model, optimizer=self.optimizer)
        return None

    def _loss(self, output: Any) -> dict[str, torch.Tensor]:
        return {"loss": output.reduce_mean().detach()} if self.rank == 0 else {}


def own(net: nn.Module) -> list[nn.Parameter]:
    return [one for one in net.parameters() if not is_sentinel(one)]


job = job_fixture(2)


@pytest.fixture(scope="module")
def checkpoint(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")

    def save(runtime: Runtime) -> None:
        divided = Divided(runtime, folder, folder)
        divided.model.load_state_dict(SAVED.state_dict())
        divided.optimizer.load_state_dict(copy.deepcopy(SAVED_OPTIMIZER.state_dict()))
        divided.do("evaluate", 0)
        smp.save_checkpoint(folder, "saved", model=divided.model, optimizer=divided.optimizer)

    results = job.run(save, {})
    assert results == [None, None], results
    return folder


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Whether what this rank found is what one process has; it may hold a part of it."""
    return all(torch.allclose(value, expected[name], rtol=1e-9, atol=1e-12) for name, value in found.items())


#: What may be refused, before the first step: values that come with it, and changes that it would undo.
REFUSED = ("come with the first step", "before the first step", "in the first step")


@pytest.mark.parametrize("part", range(4))
def test_nothing_goes_around_a_load(job: Job, checkpoint: Path, tmp_path: Path, part: int) -> None:
    refusals, wrong = 0, []
    for draw in range(part, DRAWS, 4):
        drawn = random.Random(draw)
        actions = [drawn.choice(ACTIONS) for _ in range(drawn.randint(2, 7))] + ["train", "state", "average_state"]
        if drawn.random() < 0.7:
            actions.insert(0, "resume")
        plain = Plain()
        expected = [plain.do(action, number) for number, action in enumerate(actions)]

        def main(
            runtime: Runtime, actions: list[str] = actions, expected: list[Any] = expected, draw: int = draw
        ) -> str:
            divided, differing = Divided(runtime, checkpoint, tmp_path / str(draw)), []
            for number, action in enumerate(actions):
                try:
                    found = divided.do(action, number)
                except smp.ShardwrightError as error:
                    runtime[Updates].forget()
                    if any(words in str(error) for words in REFUSED):
                        return "refused"
                    raise
                if found is not None and expected[number] is not None and not same(found, expected[number]):
                    differing.append(f"{action} {number} is wrong: {found} and not {expected[number]}")
            return "; ".join(differing) or "same"

        results = job.run(main, {})
        refusals += results == ["refused", "refused"]
        if results not in (["same", "same"], ["refused", "refused"]):
            wrong.append((draw, actions, results))
    assert not wrong, (len(wrong), wrong[:3])
    assert refusals < DRAWS / 4 / 2
