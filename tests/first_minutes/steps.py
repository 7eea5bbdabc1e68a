"""What somebody does in the first minutes, and what has to come of it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
_CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
#: An installation copies torch, on a machine that has other things to do as well.
_LIMIT_SECONDS = 900.0


class Step(NamedTuple):
    """One command.

    Attributes:
        title: What it is for.
        command: As it is typed.
        status: The exit status that it has to have.
        told: What its output has to hold.
        untold: What it must not hold.
        shown: What of its output is shown: ``None`` for all, else the lines that hold one of these.
    """

    title: str
    command: str
    status: int = 0
    told: tuple[str, ...] = ()
    untold: tuple[str, ...] = ()
    shown: tuple[str, ...] | None = None


class Done(NamedTuple):
    """What came of a step; ``why`` tells what is wrong with it, or is empty."""

    step: Step
    output: str
    seconds: float
    why: str


INSTALLED = (
    Step("The command's help", "shardwright --help", told=("run --ranks 2 SCRIPT", "doctor", "checkpoint")),
    Step("By its module", "python -m shardwright --version", told=("shardwright ",)),
    Step("How to run a script", "shardwright run --help", told=("--ranks N", "--rdzv-endpoint")),
    Step(
        "The README's script, started as plain Python",
        "python script.py",
        status=1,
        told=("world size 1 is not divisible", "shardwright run --ranks 2 script.py"),
        shown=("ConfigError:",),
    ),
    Step(
        "As it says",
        "shardwright run --ranks 2 script.py",
        told=("Partition assignments", "Memory of each rank"),
        untold=("differs", "Warning", "Traceback"),
    ),
    Step(
        "A notebook, by nbclient",
        "jupyter execute --inplace notebook.ipynb",
        told=("rank 0 of 1 has 321 parameters", "[rank 0] rank 0 of 2 has ", "[rank 1] rank 1 of 2 has "),
        shown=("rank 0 of", "rank 1 of", "[12."),
    ),
)


def installation(wheel: Path, python: str, constraint: Path) -> tuple[Step, ...]:
    """Return the steps that make an environment from the wheel, with what executes notebooks."""
    uv, pinned = shlex.quote(str(ROOT / "tools" / "uv.sh")), shlex.quote(str(constraint))
    install = f"{uv} pip install --quiet --python .venv/bin/python --constraint {pinned}"
    return (
        Step("An environment", f"{uv} venv --quiet --no-python-downloads --python {shlex.quote(python)} .venv"),
        Step("The package", f"{install} {shlex.quote(str(wheel))}"),
        Step("What executes notebooks", f"{install} nbclient ipykernel"),
    )


def prepare(folder: Path) -> None:
    """Write the README's script and the example's notebook into an empty folder."""
    (folder / "script.py").write_text("\n\n".join(_CODE.findall((ROOT / "README.md").read_text())))
    shutil.copy(ROOT / "examples" / "notebook.ipynb", folder)


def perform(step: Step, folder: Path, environment: Mapping[str, str]) -> Done:
    """Run the command of a step in the folder, and judge it."""
    began = time.monotonic()
    try:
        result = subprocess.run(
            step.command,
            shell=True,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT_SECONDS,
        )
        output, status = result.stdout, result.returncode
    except subprocess.TimeoutExpired as expired:
        output, status = str(expired), -1
    if step.command.startswith("jupyter"):
        output += written(folder / "notebook.ipynb")
    why = ""
    if status != step.status:
        why = f"it ended with {status}, not {step.status}"
    elif missing := [text for text in step.told if text not in f"\n{output}"]:
        why = f"it does not say {missing[0]!r}"
    elif unwanted := [text for text in step.untold if text in output]:
        why = f"it says {unwanted[0]!r}"
    return Done(step, output, time.monotonic() - began, why)


def written(notebook: Path) -> str:
    """Return what the cells of a notebook have written."""
    texts = []
    for cell in json.loads(notebook.read_text())["cells"]:
        for each in cell.get("outputs", []):
            text = each.get("text") or each.get("data", {}).get("text/plain") or each.get("traceback") or []
            texts.append("".join(text) if isinstance(text, list) else text)
    return "".join(text if text.endswith("\n") else f"{text}\n" for text in texts)


def transcript(done: list[Done], clean: Callable[[str], str]) -> str:
    """Return the steps as a page; ``clean`` takes what is this machine's out of a text."""
    parts = []
    for one in done:
        output = "".join(f"{line.rstrip()}\n" for line in clean(one.output).splitlines())
        if one.step.shown is not None:
            output = "".join(
                f"{line}\n" for line in output.splitlines() if any(part in line for part in one.step.shown)
            )
        parts.append(f"## {one.step.title}\n\n```console\n$ {clean(one.step.command)}\n{output.rstrip()}\n".rstrip())
        parts[-1] += "\n```\n"
    return "\n".join(parts)
