"""A load that fails midway, at every point, by every way to load: nothing runs or is saved until all is loaded.

Jobs of one rank and of two, as threads of one process.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import Runtime

from tests.checkpoint.small_training import Training
from tests.frames.job import Job, in_process_ranks

COPY = torch.Tensor.copy_


@contextmanager
def failing_copies(rank: int, point: int) -> Iterator[list[int]]:
    """Let the copy with this number on a rank fail; yield how many there were."""
    counts = [0]

    def copy(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if threading.current_thread().name == f"rank-{rank}":
            counts[0] += 1
            if counts[0] == point + 1:
                raise OSError("the disk is gone")
        return COPY(self, *args, **kwargs)

    torch.Tensor.copy_ = copy  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        torch.Tensor.copy_ = COPY  # type: ignore[method-assign]


class Averaged(Training):
    """With averages of its weights."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks, functools.partial(torch.optim.SGD, momentum=0.9))
        self.averages = smp.AveragedModel(self.model)


def uses(training: Averaged, folder: Path, ranks: int) -> dict[str, Callable[[], object]]:
    """What must not see weights that were loaded in part."""

    def applied() -> None:
        with training.averages.applied():
            pass

    model, optimizer = training.model, training.optimizer
    found: dict[str, Callable[[], object]] = {
        "step": training.step,
        "state dict": model.state_dict,
        "local state dict": model.local_state_dict,
        "optimizer": optimizer.state_dict,
        "local optimizer": optimizer.local_state_dict,
        "save": lambda: smp.save_checkpoint(folder, "bad", model=model, optimizer=optimizer),
        "full save": lambda: smp.save_checkpoint(folder, "bad", partial=False, model=model),
        "averages": training.averages.update_parameters,
        "applied": applied,
    }
    if ranks == 1:
        found["call"] = lambda: model(torch.ones(1, 3))
    return found


def loads(training: Averaged, folder: Path, state: dict[str, Any]) -> dict[str, Callable[[], object]]:
    model, optimizer = training.model, training.optimizer
    return {
        "resume": lambda: smp.resume_from_checkpoint(folder, "good", model=model, optimizer=optimizer),
        "resume weights": lambda: smp.resume_from_checkpoint(folder, "good", model=model, load_optimizer=False),
        "resume full": lambda: smp.resume_from_checkpoint(folder, "full", partial=False, model=model),
        "state dict": lambda: model.load_state_dict(state),
        "pretrained": lambda: model.load_pretrained(folder / "pretrained"),
    }


def is_untouched(training: Averaged, before: dict[str, torch.Tensor]) -> bool:
    """Whether all values can be read, and are those of before the load."""
    try:
        now = training.values()
    except smp.PartialUpdateError:
        return False
    assert all(torch.equal(value, before[key]) for key, value in now.items())
    return True


def check(runtime: Runtime, ranks: int, failing: int, folder: Path) -> list[str]:
    training = Averaged(ranks)
    for number in range(2):
        training.step(number)
    smp.save_checkpoint(folder, "good", model=training.model, optimizer=training.optimizer)
    smp.save_checkpoint(folder, "full", partial=False, model=training.model)
    training.model.save_pretrained(folder / "pretrained")
    state, good = training.model.state_dict(), training.values()
    wrong = []
    for name, load in loads(training, folder, state).items():
        for point in range(40):
            training.step()
            before = training.values()
            smp.barrier()  # the other rank's copies are counted from here on too
            with failing_copies(failing, point) as counts:
                try:
                    load()
                    failed = False
                except (smp.CheckpointError, RuntimeError, OSError):
                    failed = True
                failed_on = smp.allgather(failed, smp.WORLD)
            if not any(failed_on):
                break
            if all(smp.allgather(is_untouched(training, before), smp.WORLD)):  # it failed before it began to load
                continue
            used = uses(training, folder, ranks)
            if ranks > 1 and name == "state dict":  # which fails on one rank, and tells nobody before the next step
                used = {"step": training.step}
            for use, call in used.items():
                try:
                    call()
                    wrong.append(f"{name} failed at {point}, and {use} did not")
                except (smp.PartialUpdateError, smp.CheckpointError, smp.RemoteError) as error:
                    if "loaded in part" not in str(error):
                        wrong.append(f"{name} failed at {point}, and {use} says {error}")
            smp.resume_from_checkpoint(folder, "good", model=training.model, optimizer=training.optimizer)
            if any(not torch.equal(value, good[key]) for key, value in training.values().items()):
                wrong.append(f"{name} failed at {point}, and a whole load did not mend it")
            training.step()
        else:
            wrong.append(f"{name} never succeeded: {counts}")
        if point == 0:
            wrong.append(f"{name} copied nothing")
    return wrong


@pytest.mark.parametrize(("ranks", "failing"), [(1, 0), (2, 0), (2, 1)])
def test_nothing_runs_or_is_saved_after_a_load_that_failed_midway(ranks: int, failing: int, tmp_path: Path) -> None:
    with in_process_ranks():
        job = Job(ranks)
        results = job.run(lambda runtime: check(runtime, ranks, failing, tmp_path), {}, 110)
        assert results == [[]] * ranks, results
        job.close()


@pytest.mark.parametrize("config", [{}, {"ddp": True}, {"ddp": True, "shard_optimizer_state": True}], ids=str)
@pytest.mark.parametrize("refusing", [0, 1, None])
def test_steps_are_refused_where_one_rank_has_refused_its_state_dict(
    config: dict[str, Any], refusing: int | None
) -> None:
    def check_step(runtime: Runtime) -> list[str]:
        training = Training(1 if config else 2, torch.optim.AdamW)
        training.step()
        # Shares of state are put together on all ranks, which take them or refuse them alike.
        is_shared = "shard_optimizer_state" in config
        whole = training.optimizer.local_state_dict() if is_shared else training.optimizer.state_dict()
        training.step()
        wrong = list[str]()
        for _ in range(2):
            is_refused = refusing in (None, runtime.place.rank)
            given = copy.deepcopy(whole)
            if is_refused:
                given = {**given, "param_groups": []}
            try:
                training.optimizer.load_state_dict(given)
                wrong += ["what does not fit was loaded"] if is_refused and not is_shared else []
            except (ValueError, smp.ConfigError, smp.RemoteError) as error:
                wrong += [] if is_refused or is_shared else [f"{error}"]
            is_mixed = refusing is not None and not is_shared
            try:
                training.step()
                wrong += ["a step ran"] if is_mixed else []
            except (smp.PartialUpdateError, smp.RemoteError) as error:
                wrong += [] if is_mixed and "load_state_dict()" in str(error) else [f"{error}"]
                weights = training.model.state_dict()
                training.optimizer.load_state_dict(whole)
                training.model.load_state_dict(weights)
                training.step()
        return wrong

    with in_process_ranks():
        job = Job(2)
        assert job.run(check_step, config, 110) == [[], []]
        job.close()


def test_averages_that_were_loaded_in_part_are_not_used(tmp_path: Path) -> None:
    def check_averages(runtime: Runtime) -> None:
        training = Averaged(1)
        training.step()
        training.averages.update_parameters()
        state = training.averages.state_dict()
        training.step()
        with failing_copies(0, 2), pytest.raises(RuntimeError):
            training.averages.load_state_dict(state)
        with pytest.raises(smp.PartialUpdateError, match="averages may have been loaded in part"):
            training.averages.state_dict()
        training.step()  # weights are whole
        training.averages.load_state_dict(state)
        assert all(torch.equal(value, state[name]) for name, value in training.averages.state_dict().items())

    with in_process_ranks():
        job = Job(1)
        assert job.run(check_averages, {}) == [None]
        job.close()
