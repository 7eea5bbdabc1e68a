"""What a module changes without a trace's knowledge, and a module on another rank reads in its copy of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.errors import FrameError, RemoteError
from shardwright.job.runtime import Runtime
from torch import nn

from tests.frames.job import Job, job_fixture
from tests.state.running import MODES, SCHEDULES, SIZES

job = job_fixture(2)


class Noting(nn.Module):
    """Changes its level, or what a dict of it holds."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(width, width)
        self.level, self.levels = 1.0, {"level": 1.0}

    def note(self, value: torch.Tensor) -> None:
        self.level += float(value.detach().norm())

    def note_in_a_dict(self, value: torch.Tensor) -> None:
        self.levels["level"] += float(value.detach().norm())

    def forward(self, x: torch.Tensor, late: bool) -> torch.Tensor:
        return KINDS[self.kind](self, self.layer(x), late)


def _in_a_late_branch(note: str) -> Callable[[Noting, torch.Tensor, bool], torch.Tensor]:
    def forward(module: Noting, x: torch.Tensor, late: bool) -> torch.Tensor:
        if late:
            getattr(module, note)(x)
        return x

    return forward


def _in_a_hook(note: str) -> Callable[[Noting, torch.Tensor, bool], torch.Tensor]:
    def forward(module: Noting, x: torch.Tensor, _: bool) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: getattr(module, note)(gradient))
        return x

    return forward


class _Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: Noting) -> torch.Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.module.note(gradients[0])
        return gradients[0], None


def _in_a_backward(module: Noting, x: torch.Tensor, _: bool) -> torch.Tensor:
    noted: torch.Tensor = _Noted.apply(x, module)  # type: ignore[no-untyped-call]
    return noted


KINDS: dict[str, Callable[[Noting, torch.Tensor, bool], torch.Tensor]] = {
    "an attribute, late": _in_a_late_branch("note"),
    "a dict, late": _in_a_late_branch("note_in_a_dict"),
    "an attribute, in a tensor's hook": _in_a_hook("note"),
    "a dict, in a tensor's hook": _in_a_hook("note_in_a_dict"),
    "an attribute, in a function's backward": _in_a_backward,
}


class Reading(nn.Module):
    """Reads what its child keeps, or lets it be."""

    def __init__(self, width: int, kind: str, *, reads: bool) -> None:
        super().__init__()
        self.reads = reads
        self.before, self.child, self.after = nn.Linear(width, width), Noting(width, kind), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, late: bool) -> torch.Tensor:
        x = self.child(self.before(x), late)
        return self.after(x / (self.child.level * self.child.levels["level"]) if self.reads else x)


def run(job: Job, kind: str, size: str, settings: dict[str, Any], *, reads: bool) -> list[Any]:
    """Two steps, the second of which takes another branch: the losses, or the error."""
    rows, width = SIZES[size]

    def main(runtime: Runtime) -> list[float]:
        torch.manual_seed(0)
        module = Reading(width, kind, reads=reads)
        smp.set_partition(module.child, 1)
        model = smp.DistributedModel(module)

        @smp.step(non_split_inputs=["late"])
        def train(part: torch.Tensor, late: bool) -> torch.Tensor:
            loss = model(part, late).square().mean()
            model.backward(loss)
            return loss

        batch = torch.randn(4 * rows, width, generator=torch.Generator().manual_seed(5))
        found = [train(batch, late).outputs for late in (False, True)]
        assert model.placement.ownership is not None
        assert model.placement.ownership.decision.modules["child"] == 1
        return [float(loss) for losses in found for loss in losses]

    return job.run(main, {"auto_partition": False, "default_partition": 0, "microbatches": 4, **settings})


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_another_rank_reads_is_not_changed_behind_its_back(
    job: Job, kind: str, schedule: str, mode: str, size: str
) -> None:
    results = run(job, kind, size, {**MODES[mode], "pipeline": schedule}, reads=True)
    assert all(isinstance(result, (FrameError, RemoteError)) for result in results)
    name = "child.levels" if "dict" in kind else "child.level"
    assert all(
        f"attribute '{name}' was changed, though no trace saw that: a module on rank 0" in str(r) for r in results
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_no_other_rank_reads_may_change(job: Job, kind: str) -> None:
    results = run(job, kind, "large", {}, reads=False)
    rows, width = SIZES["large"]
    torch.manual_seed(0)
    alone = Reading(width, kind, reads=False)
    batch = torch.randn(4 * rows, width, generator=torch.Generator().manual_seed(5))
    losses = [float(alone(part, late).square().mean()) for late in (False, True) for part in batch.chunk(4)]
    for result in results:
        assert result == pytest.approx(losses)
