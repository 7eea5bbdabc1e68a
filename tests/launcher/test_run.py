"""``shardwright run`` starts the ranks of this host, and ends as the script ends; a plain start says how to start."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from shardwright.command import main

from tests.jobs.patience import HANG_SECONDS

TOLD = """
import os, sys
told = [os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ.get("OMP_NUM_THREADS"), *sys.argv[1:]]
sys.stdout.write(f"{' '.join(map(str, told))}\\n")
"""
TRAINED = """
import torch
import shardwright as smp

smp.init({"pipeline_parallel_degree": 2})
model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)))

@smp.step
def step(model, x):
    loss = model(x).mean()
    model.backward(loss)
    return loss

step(model, torch.ones(4, 4))
total = smp.stats()["server"]["total"]
print(f"{smp.rank()} {total['sent']['forward'] + total['served']['forward']}\\n", end="", flush=True)
"""


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return {**kept, "PYTHONPATH": os.pathsep.join(sys.path), **variables}


def run(folder: Path, text: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Write a script, and run the command on it."""
    (folder / "script.py").write_text(text)
    command = [sys.executable, "-m", "shardwright", "run", *arguments]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=HANG_SECONDS, env=environment(**variables)
    )


def test_ranks_train_together(tmp_path: Path) -> None:
    result = run(tmp_path, TRAINED, "--ranks", "2", "script.py")
    assert result.returncode == 0, result.stderr
    requests = dict(map(int, line.split()) for line in result.stdout.splitlines())
    assert set(requests) == {0, 1}
    assert min(requests.values()) > 0


def test_arguments_after_the_script_are_the_scripts_and_nothing_is_said_of_threads(tmp_path: Path) -> None:
    result = run(tmp_path, TOLD, "--ranks=2", "--max-restarts", "0", "script.py", "--ranks", "3")
    assert sorted(result.stdout.splitlines()) == ["0 2 1 --ranks 3", "1 2 1 --ranks 3"]
    assert (result.returncode, result.stderr) == (0, "")


def test_threads_that_are_asked_for_are_kept_and_a_module_can_be_run(tmp_path: Path) -> None:
    result = run(tmp_path, TOLD, "--ranks", "2", "-m", "script", "x", OMP_NUM_THREADS="3")
    assert sorted(result.stdout.splitlines()) == ["0 2 3 x", "1 2 3 x"]


@pytest.mark.parametrize(
    ("end", "status", "told"),
    [
        ("sys.exit(7)", 7, "rank 1 ended with exit status 7"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was ended by signal 9"),
    ],
)
def test_the_exit_status_is_that_of_the_first_rank_that_fails(tmp_path: Path, end: str, status: int, told: str) -> None:
    text = f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {end}\ntime.sleep(60)\n"
    result = run(tmp_path, text, "--ranks", "2", "script.py")
    assert result.returncode == status
    assert result.stderr.splitlines()[-1] == f"shardwright run: {told}"
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("signals", ["SIGFOO", "", "SIGTERM,SIGFOO", "SIGKILL", "sigterm", "SIGTERM,"])
def test_only_signals_that_there_are_are_handled(signals: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--signals-to-handle", signals, "script.py"]) == 2
    told = capsys.readouterr().err
    assert "is not allowed; allowed: names of signals" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks(tmp_path: Path, number: signal.Signals) -> None:
    text = "import os, time\nprint(f'{os.getpid()}\\n', end='', flush=True)\ntime.sleep(100)\n"
    (tmp_path / "script.py").write_text(text)
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwright", "run", "--ranks", "2", "script.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    assert process.stdout is not None
    ranks = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(number)
    _, told = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 128 + number
    assert told.splitlines()[-1] == f"shardwright run: the job was ended by signal {int(number)}"
    deadline = time.monotonic() + HANG_SECONDS
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < deadline, "a rank is left"
        time.sleep(0.05)


def test_a_port_that_is_in_use_is_told_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run(tmp_path, TOLD, "--ranks", "2", "--master-port", port, "script.py")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    told = result.stderr.splitlines()[-1]
    assert told.startswith(f"shardwright run: the ranks cannot meet at 127.0.0.1:{port}: ")
    assert told.endswith("address already in use; leave --master-port out, or give a free port")
    assert result.stdout == ""


def test_misuse_is_told_and_help_explains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--ranks", "2", str(tmp_path / "none.py")]) == 2
    assert capsys.readouterr().err == f"shardwright run: there is no file '{tmp_path / 'none.py'}'\n"
    for arguments in (["run"], ["run", "--ranks", "0", "script.py"], ["run", "--rank-count", "2", "script.py"]):
        assert main(arguments) == 2
        (told,) = capsys.readouterr().err.splitlines()
        assert told.startswith("shardwright run: ")
    for arguments in (["run", "--help"], ["help", "run"]):
        assert main(arguments) == 0
        told = capsys.readouterr().out
        assert "--ranks N" in told
        assert "--rdzv-endpoint" in told
        assert "event" not in told
    assert main(["--help"]) == 0
    assert "run --ranks 2 SCRIPT" in capsys.readouterr().out


def test_a_script_that_was_started_plainly_says_how_to_start_it(tmp_path: Path) -> None:
    """Under its own name, quoted, or as a module; the command that it names works."""
    (tmp_path / "my script.py").write_text(TRAINED)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(TRAINED)
    for started, named in ((["my script.py"], "'my script.py'"), (["-m", "package"], "-m package")):
        result = subprocess.run(
            [sys.executable, *started],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            env=environment(),
        )
        assert result.returncode == 1
        (told,) = [line for line in result.stderr.splitlines() if line.startswith("shardwright.errors.ConfigError")]
        assert told.endswith(f"start it as: shardwright run --ranks 2 {named}")
        assert "world size 1 is not divisible" in told
    result = subprocess.run(
        [sys.executable], input=TRAINED, capture_output=True, text=True, timeout=HANG_SECONDS, env=environment()
    )
    assert "shardwright.notebook.launch(function, ranks=2)" in result.stderr


def test_under_a_launcher_nothing_is_said_of_starting(tmp_path: Path) -> None:
    result = run(tmp_path, TRAINED, "--ranks", "3", "script.py")
    assert result.returncode == 1
    assert "world size 3 is not divisible" in result.stderr
    assert "; start 2 ranks, or a multiple of 2\n" in result.stderr
    assert "start it as" not in result.stderr
