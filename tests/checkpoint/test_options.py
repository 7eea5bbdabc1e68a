"""The options of every optimizer of PyTorch load as they were saved, whatever a script has begun with since."""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.job.runtime import Runtime
from torch.optim import Optimizer

from tests.checkpoint.small_training import Training
from tests.frames.job import Job, in_process_ranks

#: Those that take no dense gradients, that run a closure many times, and that take only matrices.
OTHERS = ("Optimizer", "SparseAdam", "LBFGS", "Muon")
KINDS = sorted(
    name
    for name, each in vars(torch.optim).items()
    if isinstance(each, type) and issubclass(each, Optimizer) and name not in OTHERS
)
#: Options that leave open what another value settles, in turn with it; each class has some of them.
SETTINGS: dict[str, tuple[Any, Any]] = {
    "eps": ((None, 1e-3), (1e-30, 1e-3)),
    "foreach": (None, False),
    "maximize": (False, True),
    "weight_decay": (0, 0.5),
    "lr": (0.1, torch.tensor(0.1)),
}


def settings(kind: Any) -> list[dict[str, Any]]:
    """Options beside the defaults: each setting that the class takes, in both its values."""
    known = inspect.signature(kind).parameters
    found: list[dict[str, Any]] = [{}]
    for key, values in SETTINGS.items():
        if key in known and (key != "eps" or isinstance(known[key].default, tuple)):
            found += [{key: value} for value in values]
    return found


@pytest.mark.parametrize("name", KINDS)
def test_options_load_as_they_were_saved(name: str, tmp_path: Path) -> None:
    kind = getattr(torch.optim, name)

    def main(runtime: Runtime) -> list[str]:
        wrong = []
        for begun in settings(kind):
            for later in [begun, *settings(kind)] if begun else [begun]:
                try:
                    wrong += went_on(kind, tmp_path, begun, later)
                except Exception as error:
                    wrong.append(f"{begun}, then {later}: {type(error).__name__}: {error}")
        return wrong

    with in_process_ranks():
        job = Job(1)
        assert job.run(main, {}, 300) == [[]]
        job.close()


#: Which kernel computes, and whether it may be captured or differentiated, are not a group's to vary.
KERNELS = ("params", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay")


@pytest.mark.parametrize("name", KINDS)
def test_options_that_differ_between_groups_load_as_they_were_saved(name: str, tmp_path: Path) -> None:
    """Options that a group or a script sets later, in pairs: a class looks only at its defaults."""
    kind = getattr(torch.optim, name)

    def others(group: dict[str, Any]) -> list[tuple[str, Any]]:
        """Each option with another value that its class takes."""
        found: list[tuple[str, Any]] = []
        for key, value in group.items():
            if isinstance(value, bool) and key not in KERNELS:
                found.append((key, not value))
            elif isinstance(value, int | float) and key not in KERNELS:
                found.append((key, value / 2 if value else 0.25))
        return found

    def main(runtime: Runtime) -> list[str]:
        wrong = []
        options = others(kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1).param_groups[0])
        pairs = [dict(pair) for pair in itertools.combinations(options, 2)]
        for changed in [*pairs, {"lr": -0.01}]:  # the last as a schedule past its end sets it
            try:
                wrong += went_on(kind, tmp_path, {}, {}, changed)
            except Exception as error:
                wrong.append(f"{changed}: {type(error).__name__}: {error}")
        return wrong

    with in_process_ranks():
        job = Job(1)
        assert job.run(main, {}, 300) == [[]]
        job.close()


@pytest.mark.parametrize(
    ("name", "key", "value"), [("SGD", "weight_decay", -0.01), ("Rprop", "etas", (1.0, 1.0)), ("Adam", "eps", -1e-12)]
)
def test_an_option_that_no_default_may_be_loads_where_a_group_has_it(
    name: str, key: str, value: Any, tmp_path: Path
) -> None:
    kind = getattr(torch.optim, name)

    def of_groups(parameters: Any, lr: float) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = kind(parameters, lr=lr)
        optimizer.param_groups[0][key] = value
        return optimizer

    def main(runtime: Runtime) -> list[str]:
        wrong = went_on(of_groups, tmp_path, {}, {})
        with pytest.raises(smp.CheckpointError, match=rf"options\[0\]\['{key}'\].*{name} takes"):
            went_on(kind, tmp_path, {}, {}, {key: value})
        return wrong

    with in_process_ranks():
        job = Job(1)
        assert job.run(main, {}, 300) == [[]]
        job.close()


def went_on(
    kind: Any, folder: Path, begun: dict[str, Any], later: dict[str, Any], changed: dict[str, Any] | None = None
) -> list[str]:
    """Train, save, and go on with an optimizer that a script has made with other options: they are the saved ones.

    Args:
        kind: The class.
        folder: Where to save.
        begun: Options with which the first optimizer is made.
        later: Options with which the second is made.
        changed: Options of the first that its group has been given since.
    """
    trainings = [
        Training(1, lambda parameters, lr, options=options: kind(parameters, **{"lr": lr, **options}))
        for options in (begun, later)
    ]
    trainings[0].optimizer.param_groups[0].update(changed or {})
    trainings[0].step(0)
    smp.save_checkpoint(folder, "a", model=trainings[0].model, optimizer=trainings[0].optimizer)
    smp.resume_from_checkpoint(folder, "a", model=trainings[1].model, optimizer=trainings[1].optimizer)
    before, after = ([values(each) for each in training.optimizer.param_groups] for training in trainings)
    for training in trainings:
        training.step(1)
    one, other = (training.values() for training in trainings)
    differ = [key for key in {**one, **other} if not torch.equal(one[key], other[key])]
    found = [f"{begun}, {changed}, then {later}: {differ} differ"] if differ else []
    return found if before == after else [*found, f"{begun}, then {later}: {before} became {after}"]


def values(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}
