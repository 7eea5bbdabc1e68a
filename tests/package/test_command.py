"""The ``shardwright`` command: it tells what a machine has, in text and in JSON, and misuse from findings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import shardwright
import torch
from shardwright.command import main

from tests.jobs.patience import HANG_SECONDS

ROOT = Path(__file__).parents[2]
CHECKS = ["shardwright", "python", "torch", "cuda", "ucx", "shared memory", "/dev/shm", "stale segments", "tcp"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardwright.command", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, env=environment)


def test_doctor_says_of_every_part_what_it_found() -> None:
    result = run("doctor")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    found = [line for line in lines if line.startswith(("ok ", "warn ", "missing "))]
    for name in CHECKS:
        assert any(line[9:].startswith(name) for line in found), name
    assert lines[-1] == "a job can run here"


def test_doctor_as_json_carries_versions_and_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--host", "127.0.0.1"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["well"] is True
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["shardwright"]["found"] == shardwright.__version__
    assert checks["torch"]["found"] == torch.__version__
    assert checks["tcp"]["required"] is True
    assert all((check["status"] == "ok") == (check["advice"] is None) for check in report["checks"])
    assert report["checks"][-2]["found"] == "127.0.0.1 is 127.0.0.1"


def test_a_host_that_nobody_knows_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--host", "no-such-host.invalid"]) == 1
    told = capsys.readouterr().out
    assert "no-such-host.invalid is not known" in told
    assert told.endswith("no job can run here: see what is missing above\n")


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"shardwright {shardwright.__version__}\n"


def test_a_misuse_goes_to_the_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docter"]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "'doctor'" in told.err


def test_the_entry_point_of_the_wheel_is_this_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"shardwright": "shardwright.command:main"}
