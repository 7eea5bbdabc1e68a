"""The examples of tensor parallelism train, and what they train does not depend on how it is divided."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(folder: Path, example: str, ranks: int, *arguments: str) -> dict[str, Any]:
    """The JSON object on the last line of what an example prints."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    result = subprocess.run(
        [sys.executable, *launch, EXAMPLES / example, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert isinstance(report, dict)
    return report


@pytest.mark.parametrize("model", ["gpt2", "bert"])
def test_a_pipeline_of_divided_layers_learns_what_one_process_learns(model: str, tmp_path: Path) -> None:
    small = ("--model", model, "--steps", "20", "--layers", "2", "--width", "64", "--sequence-length", "32")
    divided = run(tmp_path, "tensor_and_pipeline.py", 4, *small)
    alone = ("--pipeline-parallel-degree", "1", "--tensor-parallel-degree", "1")
    whole = run(tmp_path, "tensor_and_pipeline.py", 1, *small, *alone)
    assert divided["replaced"] > 0
    assert whole["replaced"] == 0
    assert divided["loss_first"] == pytest.approx(whole["loss_first"], rel=1e-4 if model == "gpt2" else 0.05)
    assert divided["loss_last"] < divided["loss_first"] - 0.5


def test_experts_learn_the_same_on_one_rank_and_on_two(tmp_path: Path) -> None:
    small = ("--steps", "60", "--width", "32")
    divided = run(tmp_path, "mixture_of_experts.py", 2, *small)
    whole = run(tmp_path, "mixture_of_experts.py", 2, *small, "--tensor-parallel-degree", "1")
    assert divided["experts"] == [[4, 64, 32]] * 2
    assert whole["experts"] == [[8, 64, 32]] * 2
    # Later ones differ by the rounding of Adam's first steps, and by tokens that go to other experts for it.
    assert divided["losses"][:8] == pytest.approx(whole["losses"][:8], rel=1e-3)
    assert divided["losses"][-1] < divided["losses"][0] - 0.5
