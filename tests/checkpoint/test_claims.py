"""What a manifest says besides tensors, changed anywhere: it loads as it was, or is refused with nothing changed."""

from __future__ import annotations

import copy
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.checkpoints import random_state, saving
from shardwright.job.runtime import Runtime

from tests.checkpoint.small_training import Training
from tests.frames.job import Job, in_process_ranks

DRAWS = 120
#: What is put in the place of a value; the last one removes it.
VALUES = (
    *(None, True, 0, -1, 1 << 70, "x", "", [], {}, [1], ["x"], {"a": 1}, [[]], [{}]),
    *({"tensor": "nope"}, {"int": "zz"}, {"float": "x"}, {"dict": [[1, 2]]}, {"dict": 3}, {"set": [[]]}, {"tuple": {}}),
    *({"scalar": ["O", ""]}, {"array": ["<f4", [2], "nope"]}, {"dtype": "nn"}, {"device": "x"}, ...),
)
#: What is put in the place of a stream of random numbers.
STREAMS = (torch.zeros(0), torch.zeros(3, dtype=torch.int64), torch.full((5056,), 255, dtype=torch.uint8))


def changed(content: Any, chance: random.Random) -> str:
    """Change a value anywhere; say what."""
    path, parent, key = "", content, chance.choice(sorted(content))
    while True:
        path += f"/{key}"
        value = parent[key]
        inner = sorted(value) if isinstance(value, dict) else [*range(len(value))] if isinstance(value, list) else []
        if not inner or chance.random() < 0.2:
            break
        parent, key = value, chance.choice(inner)
    put = chance.choice(VALUES)
    if put is ...:
        del parent[key]
    else:
        parent[key] = copy.deepcopy(put)
    return f"{path} = {put!r}"


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in {**one, **other} if not torch.equal(one[name], other[name])]


@pytest.fixture
def mutations(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the next save changes of the content, by a seed, and what it then was."""
    told: dict[str, Any] = {"seed": None, "stream": None}
    describe, streams = saving.description_of, random_state.streams

    def description_of(*args: Any) -> Any:
        description = describe(*args)
        if told["seed"] is not None:
            told["what"] = changed(description["user_content"], random.Random(told["seed"]))
        return description

    def changed_streams() -> Any:
        return {**streams(), **(told["stream"] or {})}

    monkeypatch.setattr(saving, "description_of", description_of)
    monkeypatch.setattr(saving.random_state, "streams", changed_streams)
    return told


def check(runtime: Runtime, ranks: int, folder: Path, told: dict[str, Any]) -> list[str]:
    training, wrong, outcomes = Training(ranks, torch.optim.AdamW), list[str](), Counter[str]()
    named: dict[str, Any] = {"model": training.model, "optimizer": training.optimizer}
    for number in range(2):
        training.step(number)
    content = {"step": 2, "pair": (1.5, {"x": torch.ones(2)}), "none": None}
    good = training.values()
    draws: list[tuple[int | None, Any]] = [(number, None) for number in range(DRAWS)]
    draws += [(None, {name: one}) for name in ("torch", "python", "numpy") for one in STREAMS]
    for seed, stream in draws:
        smp.barrier()
        if runtime.place.rank == 0:
            told.update(seed=seed, stream=stream, what=f"streams {stream}")
        smp.barrier()
        try:
            smp.save_checkpoint(folder, "a", user_content=content, **named)
        except smp.CheckpointError:
            continue  # JSON that the manifest's own parser refuses
        smp.barrier()
        if runtime.place.rank == 0:
            told.update(seed=None, stream=None)
        what = told["what"]
        training.step(5)
        before = training.values()
        try:
            smp.resume_from_checkpoint(folder, "a", **named)
            expected, outcome = good, "loaded"
        except smp.CheckpointError as error:
            expected, outcome = before, f"refused: {error}"
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {error}")
            expected, outcome = before, "raw"
        outcomes[outcome.partition(":")[0]] += 1
        if (differ := differing(training.values(), expected)) and outcome != "loaded":
            wrong.append(f"{what}: {outcome}, and {differ} are changed")
        try:
            training.step(6)
        except Exception as error:
            wrong.append(f"{what}: {outcome}, and the step raises {type(error).__name__}: {error}")
        smp.resume_from_checkpoint(folder.with_name("good"), "a", **named)
        if differ := differing(training.values(), good):
            wrong.append(f"{what}: {differ} are not as they were saved afterwards")
    if outcomes["loaded"] < 8 or outcomes["refused"] < 20:
        wrong.append(f"the draws are no test: {outcomes}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2])
def test_content_loads_as_it_was_saved_or_nothing_is_changed(
    ranks: int, tmp_path: Path, mutations: dict[str, Any]
) -> None:
    def main(runtime: Runtime) -> list[str]:
        training = Training(ranks, torch.optim.AdamW)
        for number in range(2):
            training.step(number)
        named: dict[str, Any] = {"model": training.model, "optimizer": training.optimizer}
        smp.save_checkpoint(tmp_path / "good", "a", **named)
        return check(runtime, ranks, tmp_path / "changed", mutations)

    with in_process_ranks():
        job = Job(ranks)
        results = job.run(main, {}, 300)
        assert results == [[]] * ranks, results
        job.close()
