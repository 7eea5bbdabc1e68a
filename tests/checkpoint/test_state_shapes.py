"""State of an optimizer with other shapes or kinds of numbers: refused on all ranks, before anything is changed."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import Runtime
from transformers.optimization import Adafactor

from tests.checkpoint.small_training import Training
from tests.frames.job import Job, in_process_ranks

DRAWS = 14


def matrices_with(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """Muon takes nothing but matrices."""
    return torch.optim.Muon([one for one in parameters if one.dim() == 2], lr=lr)


KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": functools.partial(torch.optim.AdamW, amsgrad=True),
    "SGD": functools.partial(torch.optim.SGD, momentum=0.9),
    "RMSprop": functools.partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "NAdam": torch.optim.NAdam,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
    "Adafactor of transformers": functools.partial(Adafactor, relative_step=False, beta1=0.9),
    "Muon": matrices_with,
    "LAMB": smp.optimizers.FusedLamb,
    "NovoGrad": smp.optimizers.FusedNovoGrad,
}


def others(value: Any, of: torch.Size) -> Iterator[Any]:
    """What a step does not keep in the place of a value of a parameter's state."""
    if not isinstance(value, torch.Tensor):
        yield from (torch.ones(2), torch.ones(of), "x", None, torch.tensor(1j))
        return
    shape = tuple(value.shape)
    shapes = [(*shape, 2), (2, *shape), (7,), (), (1,), (1, 1), shape[:-1], shape[1:], shape[::-1], (5, 5), tuple(of)]
    shapes += [(*shape[:-1], shape[-1] + 1), (shape[0] + 1, *shape[1:])] if shape else []
    yield from (torch.ones(one, dtype=value.dtype) for one in dict.fromkeys(shapes) if one != shape)
    yield from (torch.ones(shape, dtype=torch.complex64), torch.ones(shape, dtype=torch.bool), 0.5, "x")
    if shape:
        yield from (torch.ones(shape, dtype=torch.int64), None)


def draws(training: Training) -> list[tuple[torch.Tensor, str, Any]]:
    """Changes of what this rank has: the parameter, the key of its state, and what stands there then."""
    found = [
        (parameter, key, other)
        for group in training.optimizer.param_groups
        for parameter in group["params"]
        for key, value in training.optimizer.state.get(parameter, {}).items()
        for other in others(value, parameter.shape)
        # The first step makes this buffer, as PyTorch's own state dicts of other options have it.
        if not (key == "momentum_buffer" and other is None)
    ]
    return random.Random(len(found)).sample(found, DRAWS)


def unchanged(training: Training, load: Callable[[], object]) -> str:
    """Load; how that is not a refusal that leaves all as it was."""
    before = training.values()
    try:
        load()
        return "it was loaded"
    except smp.CheckpointError:
        pass
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    after = training.values()
    differ = [key for key in {**before, **after} if not torch.equal(before[key], after[key])]
    return f"refused, and {differ} are changed" if differ else ""


def check(runtime: Runtime, ranks: int, changing: int, name: str, folder: Path) -> list[str]:
    kind, wrong = KINDS[name], list[str]()
    training = Training(ranks, kind)
    for number in range(2):
        training.step(number)
    named: dict[str, Any] = {"model": training.model, "optimizer": training.optimizer}
    smp.save_checkpoint(folder, "good", **named)
    good = training.values()
    is_here = runtime.place.rank == changing
    drawn = draws(training) if is_here else [None] * DRAWS
    for number, change in enumerate(drawn):
        if change is not None:
            parameter, key, other = change
            value, training.optimizer.state[parameter][key] = training.optimizer.state[parameter][key], other
        smp.save_checkpoint(folder, "bad", **named)
        if change is not None:
            training.optimizer.state[parameter][key] = value
        target = training if number % 2 else Training(ranks, kind)  # which is divided in its first step
        into: dict[str, Any] = {"model": target.model, "optimizer": target.optimizer}
        if said := unchanged(target, lambda into=into: smp.resume_from_checkpoint(folder, "bad", **into)):
            wrong.append(f"{change}: {said}")
        smp.resume_from_checkpoint(folder, "good", **into)
        target.step(number)
        if target is training:
            smp.resume_from_checkpoint(folder, "good", **into)
    if any(not torch.equal(value, good[key]) for key, value in training.values().items()):
        wrong.append("the good checkpoint does not load as it was saved")
    return wrong


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("ranks", "changing"), [(1, 0), (2, 0), (2, 1)])
def test_state_that_a_step_does_not_keep_is_refused(ranks: int, changing: int, name: str, tmp_path: Path) -> None:
    with in_process_ranks():
        job = Job(ranks)
        assert job.run(lambda runtime: check(runtime, ranks, changing, name, tmp_path), {}, 300) == [[]] * ranks
        job.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_tensors_of_a_full_checkpoint_of_other_shapes_are_refused(ranks: int, tmp_path: Path) -> None:
    def main(runtime: Runtime) -> list[str]:
        training, wrong = Training(ranks, torch.optim.AdamW), list[str]()
        training.step()
        smp.save_checkpoint(tmp_path, "full", partial=False, model=training.model)
        whole = smp.load(str(tmp_path / "full"), partial=False)
        for name, value in whole.items():
            shapes = [(), (7,), tuple(value.shape)[:-1], (*value.shape, 2), (*value.shape[:-1], value.shape[-1] + 1)]
            for other in [*map(torch.ones, shapes), 0.5, None, "x"]:
                smp.save({**whole, name: other}, str(tmp_path / "bad"), partial=False)
                smp.barrier()
                said = unchanged(
                    training,
                    lambda: smp.resume_from_checkpoint(tmp_path, "bad", partial=False, model=training.model),
                )
                wrong += [f"{name} {other}: {said}"] if said else []
                smp.barrier()
        training.step()
        return wrong

    with in_process_ranks():
        job = Job(ranks)
        assert job.run(main, {}, 300) == [[]] * ranks
        job.close()
