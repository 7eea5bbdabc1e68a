"""Trainers of a script's own, or another library's, train over ranks as they do alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from shardwright.launcher import command

from tests.jobs.patience import HANG_SECONDS
from tests.jobs.ranks import outputs_of_ranks
from tests.trainers.own import TRAINERS
from tests.trainers.runs import ROOT

JOBS = {
    "pp2 of 1 microbatch": (2, {"pipeline_parallel_degree": 2, "microbatches": 1}),
    "pp2 of 4 microbatches": (2, {"pipeline_parallel_degree": 2, "microbatches": 4}),
    "dp2 of 2 microbatches": (2, {"ddp": True, "microbatches": 2}),
    "pp2 x dp2": (4, {"pipeline_parallel_degree": 2, "ddp": True, "microbatches": 2}),
}
#: What a replica computes with all rows of the batch, or draws, is not what one process does.
_ONE_REPLICA_ONLY = {"all rows", "sampling"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("own")
    outputs_of_ranks("-m", "tests.trainers.own_rank", folder, "null", ranks=0, folder=ROOT)
    return folder


_SLOW = {"pp2 of 1 microbatch", "dp2 of 2 microbatches"}


@pytest.mark.parametrize("job", [pytest.param(job, marks=pytest.mark.slow) if job in _SLOW else job for job in JOBS])
def test_overrides_do_what_they_do_alone(job: str, plain: Path) -> None:
    ranks, config = JOBS[job]
    outputs = outputs_of_ranks("-m", "tests.trainers.own_rank", plain, json.dumps(config), ranks=ranks, folder=ROOT)
    reports: list[dict[str, Any]] = [json.loads(one.splitlines()[-1]) for one in outputs]
    for name in TRAINERS:
        for report in reports:
            assert report[name]["whole_batch"]
            if not (name in _ONE_REPLICA_ONLY and "ddp" in config):
                difference, of = report[name]["logged"]
                assert difference < 1e-6, (name, of)
                assert report[name]["weights"] < 1e-12, name
        pipelines = [reports[i : i + 2] for i in range(0, ranks, 2)] if "pp2" in job else [[one] for one in reports]
        for first, *others in pipelines:
            for other in others:  # what was counted in steps, and so what is logged
                assert other[name]["counted"] == first[name]["counted"], name
    several = config["microbatches"] > 1
    assert [name for name in TRAINERS if reports[0][name]["warned"]] == (["flattened", "all rows"] if several else [])
    assert not any(one["warned"] for report in reports[1:] for one in report.values())


SCRIPT = """
import json, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer import Trainer as Same
import beside

class Own(Trainer):
    def log(self, logs, *others):
        super().log({**logs, "beside": beside.VALUE}, *others)

assert Same is Trainer and __name__ == "__main__" and sys.argv[1:] == ["--folder", "out folder"], sys.argv
torch.manual_seed(0)
config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0,
                    attn_pdrop=0, bos_token_id=1, eos_token_id=1)
ids = torch.randint(32, (32, 8), generator=torch.Generator().manual_seed(1))
trainer = Own(
    GPT2LMHeadModel(config).double(),
    TrainingArguments(sys.argv[2], per_device_train_batch_size=8, max_steps=3, logging_steps=1, save_strategy="no",
                      report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
                      train_sampling_strategy="sequential"),
    train_dataset=[{"input_ids": row, "labels": row} for row in ids],
)
trainer.train()
losses = [(one["loss"], one["grad_norm"]) for one in trainer.state.log_history if "loss" in one]
if trainer.is_world_process_zero():
    print(json.dumps([losses, trainer.args.world_size, trainer.state.log_history[0]["beside"]]))
"""


@pytest.mark.parametrize("given", ["file", "module"])
def test_a_script_with_no_line_changed_trains_over_ranks(given: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("VALUE = 5\n")
    arguments = ["--folder", "out folder"]
    what = ["train.py"] if given == "file" else ["-m", "train"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'python'}", "OMP_NUM_THREADS": "1"}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command, *what, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )

    plain = run()
    assert plain.returncode == 0, plain.stderr
    over = run("-m", "shardwright", "run", "--ranks", "2", "--pp", "2", "--microbatches", "4", "--trainers")
    assert over.returncode == 0, over.stderr
    wanted, found = (json.loads(one.stdout.splitlines()[-1]) for one in (plain, over))
    assert found[1:] == wanted[1:] == [1, 5]
    for ours, theirs in zip(found[0], wanted[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    said = [line for line in over.stderr.splitlines() if "train over 2 ranks" in line]
    assert len(said) == 1, over.stderr
    assert "pipelines of 2, 1 with samples of their own, batches in 4 microbatches" in said[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--pp", "2", "train.py"], "--pp without --trainers"),
        (["--pp", "0", "--trainers", "train.py"], "--pp: '0' is not allowed"),
        (["--trainers", "--no-python", "train"], "--trainers with --no-python"),
        (["--trainers", "there-is-none.py"], "there is no file 'there-is-none.py'"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert command.main(options) == command.MISUSE
    assert said in capsys.readouterr().err
