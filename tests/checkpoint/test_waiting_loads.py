"""Loads that wait for the first step: if steps fail before the model is divided, and beside hooks of the script.

Ranks are threads of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import Runtime
from shardwright.model.sentinel import is_sentinel
from torch import nn

from tests.frames.job import Job, job_fixture

WIDTH = 3
BATCH = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).view(4, WIDTH)
BROKEN = torch.full((4, WIDTH), 1e6, dtype=torch.float64)


class Layer(nn.Linear):
    """A layer with a mean that it updates in place, and one past its version, and that breaks at large values."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(1, dtype=torch.float64), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.mul_(0.5).add_(inputs.mean(0))
            self.count.data += 1
        if inputs.abs().max() > 1000:
            raise ValueError("on purpose")
        return super().forward(inputs) + self.mean.clone()


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Layer(), nn.BatchNorm1d(WIDTH, dtype=torch.float64), Layer())


@smp.step(microbatches=2)
def stepped(model: smp.DistributedModel, inputs: torch.Tensor) -> torch.Tensor:
    loss = model(inputs).square().mean()
    model.backward(loss)
    return loss


@smp.step(microbatches=2)
def evaluated(model: smp.DistributedModel, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).square().mean()


@smp.step(microbatches=2)
def broken_before(model: smp.DistributedModel, inputs: torch.Tensor) -> torch.Tensor:
    model.module[0].mean.add_(1)
    raise ValueError("on purpose")


class Divided:
    """A model over a pipeline of two ranks."""

    def __init__(self, seed: int) -> None:
        self.net = net(seed)
        smp.set_partition(self.net[2], 1)
        self.model = smp.DistributedModel(self.net)
        self.optimizer = smp.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9))

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = stepped(self.model, BATCH).reduce_mean().item()
        self.optimizer.step()
        return loss

    def values(self) -> dict[str, torch.Tensor]:
        """All that this rank holds of the model, without giving it what waits."""
        module = self.model.module
        named = (*module.named_parameters(), *module.named_buffers())
        return {name: one.detach().clone() for name, one in named if not is_sentinel(one)}


job = job_fixture(2)


@pytest.fixture(scope="module")
def saved(job: Job, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A checkpoint; and for each rank: its part, the loss of the step after, and the values of the model after that."""
    folder = tmp_path_factory.mktemp("saved")

    def main(runtime: Runtime) -> tuple[Any, float, dict[str, torch.Tensor]]:
        divided = Divided(1)
        divided.step()
        smp.save_checkpoint(folder, "t", model=divided.model, optimizer=divided.optimizer)
        part = {name: torch.as_tensor(value).clone() for name, value in divided.model.local_state_dict().items()}
        for _, buffer in divided.model.local_named_buffers():
            if buffer.shape == (1,):  # not persistent: as it is at the start
                buffer.zero_()
        return part, divided.step(), divided.values()

    return folder, job.run(main, {})


def fails(run: Callable[[], object]) -> None:
    with pytest.raises((ValueError, smp.RemoteError), match="on purpose"):
        run()


def in_evaluation(divided: Divided) -> None:
    with torch.no_grad():
        evaluated(divided.model, BROKEN)


#: Ways in which a first step fails before the model is divided.
FAILURES: dict[str, Callable[[Divided], object]] = {
    "in a forward": lambda divided: stepped(divided.model, BROKEN),
    "before the model is called": lambda divided: broken_before(divided.model, BATCH),
    "in an evaluation": in_evaluation,
    "in a verification": lambda divided: smp.verify(stepped, divided.model, BROKEN),
}
LOADS: dict[str, Callable[[Divided, Path, Any], object]] = {
    "checkpoint": lambda divided, folder, _: smp.resume_from_checkpoint(
        folder, "t", model=divided.model, optimizer=divided.optimizer
    ),
    "part": lambda divided, _, part: divided.model.load_state_dict(part, same_partition_load=True),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_step_that_fails_before_the_division_leaves_a_load_that_waits(
    job: Job, saved: tuple[Path, list[Any]], failure: str
) -> None:
    folder, expected = saved

    def main(runtime: Runtime) -> tuple[float, dict[str, torch.Tensor]]:
        divided = Divided(2)
        LOADS["checkpoint"](divided, folder, None)
        before = divided.values()
        for _ in range(2):
            fails(lambda: FAILURES[failure](divided))
        assert all(torch.equal(value, before[name]) for name, value in divided.values().items())
        return divided.step(), divided.values()

    for (loss, values), (_, wanted, after) in zip(job.run(main, {}), expected, strict=True):
        assert loss == pytest.approx(wanted, rel=1e-12)
        for name, value in after.items():
            torch.testing.assert_close(values[name], value, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("failure", FAILURES)
def test_a_state_dict_after_such_a_failure_has_the_loaded_values(
    job: Job, saved: tuple[Path, list[Any]], failure: str
) -> None:
    folder, expected = saved

    def main(runtime: Runtime) -> dict[str, Any]:
        divided = Divided(2)
        LOADS["checkpoint"](divided, folder, None)
        fails(lambda: FAILURES[failure](divided))
        return divided.model.state_dict()

    for state in job.run(main, {}):
        for part, *_ in expected:
            part.pop("_smp_is_partial", None)
            assert all(torch.equal(state[name], value) for name, value in part.items())


def test_a_change_by_the_script_is_refused_before_and_after_a_step_that_fails(
    job: Job, saved: tuple[Path, list[Any]]
) -> None:
    folder, _ = saved

    def main(runtime: Runtime) -> list[str]:
        divided, refusals = Divided(2), []
        LOADS["checkpoint"](divided, folder, None)
        with torch.no_grad():
            divided.net[0].mean.add_(1)  # past the model
        fails(lambda: broken_before(divided.model, BATCH))
        for _ in range(2):
            with pytest.raises((smp.ShardwrightError, smp.RemoteError), match="changed after checkpoint 't'") as caught:
                divided.step()
            refusals.append(str(caught.value))
        return refusals

    for refusals in job.run(main, {}):
        assert all("'0.mean' changed" in refusal for refusal in refusals), refusals


@pytest.mark.parametrize("way", LOADS)
@pytest.mark.parametrize("first", [True, False], ids=["hook first", "load first"])
def test_hooks_of_the_script_see_and_change_loaded_values(
    job: Job, saved: tuple[Path, list[Any]], way: str, first: bool
) -> None:
    folder, expected = saved
    parts = [part for part, *_ in expected]

    def main(runtime: Runtime) -> tuple[bool, bool, bool]:
        divided, rank = Divided(2), runtime.place.rank
        part = {**parts[rank], "_smp_is_partial": True}
        seen: list[dict[str, torch.Tensor]] = []
        states: list[int] = []

        def hook(model: smp.DistributedModel, optimizer: Any) -> None:
            seen.append(divided.values())
            states.append(len(optimizer.local_state_dict()["state"]))
            with torch.no_grad():
                for one in (*model.local_parameters(), *model.local_buffers()):
                    one.fill_(7)

        if first:
            divided.model.register_post_partition_hook(hook)
        LOADS[way](divided, folder, part)
        if not first:
            divided.model.register_post_partition_hook(hook)
        fails(lambda: stepped(divided.model, BROKEN))
        with torch.no_grad():  # in evaluation mode, which changes no statistics of batch normalization
            divided.model.eval()
            evaluated(divided.model, BATCH)
        held = divided.values()
        saw = all(
            torch.equal(seen[0][name], torch.as_tensor(value)) for name, value in parts[rank].items() if name in seen[0]
        )
        kept = all(bool((value == 7).all()) for name, value in held.items() if not name.endswith(("mean", "count")))
        return len(seen) == 1 and saw, kept, states == [len(list(divided.model.local_parameters()))]

    for saw, kept, has_state in job.run(main, {}):
        assert saw
        assert kept
        assert has_state or way == "part"


def test_a_hook_that_fails_loses_no_load(job: Job, saved: tuple[Path, list[Any]]) -> None:
    folder, expected = saved

    def main(runtime: Runtime) -> float:
        divided = Divided(2)

        def hook(*_: object) -> None:
            raise ValueError("on purpose")

        divided.model.register_post_partition_hook(hook)
        LOADS["checkpoint"](divided, folder, None)
        fails(divided.step)
        return divided.step()

    assert job.run(main, {}) == pytest.approx([loss for _, loss, _ in expected], rel=1e-12)


def test_a_part_that_is_refused_when_the_model_is_divided_lets_no_step_run_without_it(
    job: Job, saved: tuple[Path, list[Any]]
) -> None:
    _, expected = saved

    def main(runtime: Runtime) -> None:
        divided = Divided(2)
        part = {**expected[runtime.place.rank][0], "_smp_is_partial": True, "unknown": torch.ones(1)}
        LOADS["part"](divided, Path(), part)
        with pytest.raises((RuntimeError, smp.RemoteError), match="unknown"):
            divided.step()
        with pytest.raises(smp.PartialUpdateError, match="before all of it is loaded"):
            divided.step()
        smp.barrier()

    assert job.run(main, {}) == [None, None]
