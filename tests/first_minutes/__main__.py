"""Does what a newcomer does, in an empty directory and an environment made from the wheel, and writes a transcript."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

from tests.first_minutes.steps import INSTALLED, ROOT, Done, installation, perform, prepare, transcript

_PAGE = """# The first minutes

What `make first-minutes` did in an empty directory: it installed the wheel into a new environment, and ran the script
of the [README](../../README.md) and [a notebook](../../examples/notebook.ipynb). See
[Getting started](getting-started.md), [Launching](launching.md) and [Notebooks](notebooks.md).

"""
#: What would let a command find this tree, or tell it of ranks.
_CLEARED = ("PYTHONPATH", "OMP_NUM_THREADS", "VIRTUAL_ENV", "RANK", "WORLD_SIZE", "SM_HP_MP_PARAMETERS")


def main() -> int:
    """Parse, run, write, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.first_minutes", description=__doc__)
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--wheel", type=Path, help="the wheel that is installed")
    chosen.add_argument("--environment", type=Path, help="an environment that has the package and nbclient already")
    parser.add_argument("--transcript", type=Path, help="the page to write")
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="first-minutes-") as name:
        folder = Path(name).resolve()
        environment = folder / ".venv" if given.environment is None else given.environment.absolute()
        done = run(folder, environment, given.wheel)
        if given.transcript is not None:
            given.transcript.write_text(_PAGE + transcript(done, lambda text: cleaned(text, folder, environment)))
    failed = sum(bool(one.why) for one in done)
    print(json.dumps({"steps": len(done), "failed": failed, "seconds": round(time.monotonic() - began, 1)}), flush=True)
    return int(failed > 0)


def run(folder: Path, environment: Path, wheel: Path | None) -> list[Done]:
    """Perform the steps in an empty folder; those after a failed installation are not tried."""
    variables = {name: value for name, value in os.environ.items() if name not in _CLEARED}
    variables["PATH"] = f"{environment / 'bin'}:{variables['PATH']}"
    variables["COLUMNS"] = "110"
    done: list[Done] = []
    if wheel is not None:
        locked = ROOT / "requirements" / "development.txt"
        for step in installation(wheel.absolute(), sys.executable, locked):
            done.append(told(perform(step, folder, variables)))
            if done[-1].why:
                return done
    prepare(folder)
    for step in INSTALLED:
        done.append(told(perform(step, folder, variables)))
    return done


def told(one: Done) -> Done:
    """Say what came of a step."""
    print(f"{one.step.command}: {one.why or 'done'} ({one.seconds:.0f} s)", file=sys.stderr)
    if one.why:
        print(one.output, file=sys.stderr)
    return one


def cleaned(text: str, folder: Path, environment: Path) -> str:
    """Take this machine's paths out of a text."""
    text = re.sub(r"\S*/tools/uv\.sh", "uv", text)
    text = re.sub(
        r" --no-python-downloads --python \S+ | --constraint \S+| --quiet", lambda m: " " * m[0].endswith(" "), text
    )
    text = re.sub(r"\S*/(shardwright-\S+\.whl)", r"\1", text)
    for path, shown in ((environment, ".venv"), (folder, "."), (ROOT, "shardwright")):
        text = text.replace(str(path), shown)
    return text


if __name__ == "__main__":
    sys.exit(main())
