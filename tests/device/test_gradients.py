"""Float32 gradients of one and of two ranks on a device are those of one process."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy
import pytest
import torch

from tests.jobs.ranks import outputs_of_ranks

JOB = Path(__file__).with_name("gradient_job.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
TOLERANCE = 1e-4  # float32, of the model's largest gradient: orders of summation differ

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def run_job(ranks: int, script: Path, *arguments: str) -> str:
    """Run a script on some ranks that form one pipeline; returns the last line of rank 0's output."""
    environment = {"SM_HP_MP_PARAMETERS": json.dumps({"pipeline_parallel_degree": ranks})}
    first, *_ = outputs_of_ranks(script, *arguments, ranks=ranks, environment=environment)
    return (first.splitlines() or [""])[-1]


def one_process(device: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the job's model in this process, in float64."""
    spec = importlib.util.spec_from_file_location("gradient_job", JOB)
    assert spec
    assert spec.loader
    job = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(job)
    model, ids = job.build(device)
    model = model.double()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: p.grad.cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_those_of_one_process(device: str, ranks: int, tmp_path: Path) -> None:
    run_job(ranks, JOB, device, str(tmp_path))
    loss, expected = one_process(device)
    saved = [dict(numpy.load(tmp_path / f"rank{rank}.npz")) for rank in range(ranks)]
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    seen: set[str] = set()
    for own in saved:
        assert float(own.pop("loss")) == pytest.approx(loss, rel=1e-4)
        assert own, "a rank owns no parameters"
        assert not seen & own.keys(), "two ranks own a parameter"
        seen |= own.keys()
        for name, gradient in own.items():
            assert (torch.from_numpy(gradient).double() - expected[name]).abs().max() < TOLERANCE * largest, name
    assert seen == expected.keys()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_trains_on_a_gpu(ranks: int) -> None:
    report = json.loads(run_job(ranks, EXAMPLE, "--steps", "60"))
    assert report["loss_last"] < report["loss_first"] - 1
    assert report["ranks"] == ranks
