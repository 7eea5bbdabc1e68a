"""``python -m shardwright.verify``: what it prints, and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest
from shardwright.verify import command

from tests.jobs.forked import Forked
from tests.jobs.patience import HANG_SECONDS

SCRIPT = """
import shardwright as smp
import torch
from torch import nn


@smp.step
def train_step(model, inputs, targets):
    loss = nn.functional.mse_loss(model(inputs), targets)
    model.backward(loss)
    return loss


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.001


class Block(nn.Linear):
    scales = False

    def forward(self, value):
        value = super().forward(value).tanh()
        return Scaled.apply(value) if self.scales else value


def build():
    model = nn.Sequential(Block(8, 8), nn.Dropout(0.1), Block(8, 8), Block(8, 8), Block(8, 8))
    return model, train_step, (torch.randn(16, 8), torch.randn(16, 8))


def build_faulty():
    made = build()
    made[0][4].scales = smp.rank() == 1  # it runs on rank 1, and the whole model is built on rank 0
    return made


def build_nothing():
    return build()[0]
"""


def run(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, dict[str, Any], str]:
    """Exit status, standard output before its last line, that line, and standard error."""
    (folder / "script.py").write_text(SCRIPT)
    status = command.main(list(options))
    written = capsys.readouterr()
    *table, last = written.out.splitlines()
    return status, "\n".join(table), json.loads(last), written.err


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forked from a process that has torch loaded; otherwise the command starts them."""

    def start(program: list[str], environment: dict[str, str], log: IO[bytes]) -> Forked:
        return Forked(program[1:], environment, stdout=log, stderr=subprocess.STDOUT)

    monkeypatch.setattr(command, "_start_rank", start)


def test_an_exact_step_ends_with_0_and_a_line_of_json(tmp_path: Path) -> None:
    """The command as a user runs it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    result = subprocess.run(
        [sys.executable, "-m", "shardwright.verify", "script.py:build", "--pp", "2", "--microbatches", "2"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    *table, last = result.stdout.splitlines()
    outcome = json.loads(last)
    assert "exact: the distributed step equals one process" in "\n".join(table)
    assert outcome["exact"]
    assert outcome["dtype"] == "float64"
    assert outcome["ranks_with_parameters"] == [0, 1]
    assert min(outcome["requests"]) > 0


@pytest.mark.usefixtures("forked_ranks")
def test_a_fault_ends_with_1_and_names_the_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = f"{tmp_path}/script.py:build_faulty"
    status, table, outcome, errors = run(tmp_path, capsys, target, "--dtype", "float32", "--pipeline", "simple")
    assert status == 1, errors
    assert "NOT exact. First departure: backward of module '4'" in table
    assert (outcome["exact"], outcome["first_departure"], outcome["dtype"]) == (False, "4", "float32")


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("build_nothing", "allowed: (model, step_function, batch)"),
        ("absent", "has no function 'absent'"),
    ],
)
def test_what_a_script_does_wrong_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, said: str
) -> None:
    status, _, outcome, errors = run(tmp_path, capsys, f"{tmp_path}/script.py:{target}")
    assert status == 2
    assert said in errors
    assert not outcome["exact"]


@pytest.mark.parametrize(
    "arguments", [["nothing.py:build"], ["no target"], [f"{__file__}:build", "--tolerance", "0"]], ids=str
)
def test_misuse_ends_with_2_before_anything_is_started(arguments: list[str]) -> None:
    assert command.main(arguments) == 2


@pytest.mark.parametrize("option", ["--pp=0", "--dtype=int8", "--config=no"])
def test_options_are_refused_at_the_door(option: str) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([f"{__file__}:build", option])
    assert ended.value.code == 2
