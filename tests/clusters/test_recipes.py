"""The recipes for clusters start jobs, and the image is what they need."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.jobs.patience import HANG_SECONDS
from tests.jobs.ports import next_port

from .running import RECIPES, SCRIPT, run_recipe, trained_by

STEPS = ("--steps", "8", "--save-every", "4", "--width", "16", "--layers", "2")
#: What the batch system sets for the script of a job.
BATCH = {"SLURM_JOB_NODELIST": "node-[0-1]", "SLURM_CPUS_PER_TASK": "1"}
ROOT = RECIPES.parents[1]

pytestmark = pytest.mark.timeout(300)


def test_the_slurm_script_starts_the_tasks_of_srun(tmp_path: Path) -> None:
    done = run_recipe(
        "train.slurm", SCRIPT, "--folder", tmp_path / "run", *STEPS, folder=tmp_path, **BATCH, SLURM_JOB_ID="77"
    )
    assert done.returncode == 0, done.stderr
    assert trained_by(tmp_path / "run") == ({"from_step": 0, "ranks": 2, "stages": 2, "replicas": 1}, 8)


def test_a_task_that_fails_ends_the_slurm_script_and_the_other_tasks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text('import os, time\nassert os.environ["SLURM_PROCID"] == "0"\ntime.sleep(600)\n')
    done = run_recipe("train.slurm", script, folder=tmp_path, **BATCH, SLURM_JOB_ID="78")
    assert done.returncode != 0
    assert "AssertionError" in done.stderr


def test_the_mpirun_script_hands_on_the_secret_and_the_address(tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("# hosts\n\n127.0.0.1 slots=2\n")
    done = run_recipe("train.mpirun", hostfile, SCRIPT, "--folder", tmp_path / "run", *STEPS, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert trained_by(tmp_path / "run") == ({"from_step": 0, "ranks": 2, "stages": 2, "replicas": 1}, 8)


def test_the_elastic_script_goes_on_from_the_newest_checkpoint_with_other_ranks(tmp_path: Path) -> None:
    common = {"NODES": "1", "SHARDWRIGHT_SECRET": "the secret of the test", "GLOO_SOCKET_IFNAME": "lo"}
    for number, (steps, ranks) in enumerate((("4", "2"), ("8", "1"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        arguments = ("--folder", tmp_path / "run", *STEPS, "--steps", steps)
        address = f"127.0.0.1:{next_port()}"
        done = run_recipe(
            "train.elastic", SCRIPT, *arguments, folder=folder, RENDEZVOUS=address, RANKS_PER_NODE=ranks, **common
        )
        assert done.returncode == 0, done.stderr
    assert trained_by(tmp_path / "run") == ({"from_step": 4, "ranks": 1, "stages": 1, "replicas": 1}, 8)


def test_the_elastic_script_says_which_variables_are_missing(tmp_path: Path) -> None:
    done = run_recipe("train.elastic", SCRIPT, folder=tmp_path, RENDEZVOUS="127.0.0.1:1")
    assert done.returncode != 0
    assert "SHARDWRIGHT_SECRET: the secret of the job" in done.stderr


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("train.*")), ids=lambda path: path.name)
def test_scripts_are_executable_and_bash_reads_them(recipe: Path) -> None:
    assert recipe.stat().st_mode & 0o111
    text = recipe.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    subprocess.run(["bash", "-n", recipe], check=True, timeout=HANG_SECONDS)


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (RECIPES / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def test_the_image_is_of_a_named_version_runs_as_its_own_user_and_keeps_no_caches() -> None:
    found = instructions()
    allowed = {"FROM", "RUN", "COPY", "WORKDIR", "USER", "ENV", "CMD"}
    assert {name for name, _ in found} <= allowed
    assert found[0][0] == "FROM"
    assert re.fullmatch(r"[a-z/]+:\d[\w.-]+", found[0][1])
    users = [words for name, words in found if name == "USER"]
    assert users[-1] not in ("root", "0")
    assert any(f"useradd --create-home --uid 1000 {users[-1]}" in words for name, words in found if name == "RUN")
    assert all("--no-cache-dir" in words for name, words in found if "pip install" in words)
    assert not any(secret in words for _, words in found for secret in ("SECRET", "sudo", "curl | "))
    assert found[-1] == ("CMD", '["shardwright", "doctor"]')


def test_what_the_image_copies_is_there_and_goes_to_the_build() -> None:
    let_through = {
        line[1:] for line in (RECIPES / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")
    }
    sources = {words.split()[0] for name, words in instructions() if name == "COPY"}
    assert sources == let_through
    assert (ROOT / "examples" / "elastic.py").exists()
