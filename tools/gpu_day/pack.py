"""Builds what a GPU machine gets that has Python, torch, transformers and nothing else: neither cargo nor a network.

The pack is a folder: the package with its optimised, stripped extension, as wheels have it; the stand-in for CUDA's
driver; the tests, tools, benchmarks and examples; and pytest and rich, for a machine without. The last lines are the
command to run there, and a JSON object.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: What travels, beside what is built.
_TRAVELS = ("python", "tests", "tools", "benches", "examples", "compat", "pyproject.toml")
_EXTENSION = Path("python/shardwright/_core.abi3.so")
_REHEARSAL = "libshardwright_cuda_rehearsal.so"
#: What the steps import beside torch, transformers and NumPy, and the distributions, of Python alone, that have it.
_IMPORTS = ("pytest", "pytest_timeout", "xdist", "rich")
_DISTRIBUTIONS = (
    *("pytest", "pytest-timeout", "pytest-xdist", "execnet", "iniconfig", "packaging", "pluggy"),
    *("rich", "markdown-it-py", "mdurl", "pygments"),
)
#: The most that a pack may take.
MAX_BYTES = 40 << 20
_GLIBC = re.compile(rb"GLIBC_(\d+)\.(\d+)(?:\.\d+)?\0")
#: Loads the extension alone, in an interpreter that may have no torch, and says that it is the one of the pack.
_LOAD = """
import importlib.machinery, importlib.util, sys
loader = importlib.machinery.ExtensionFileLoader("shardwright._core", sys.argv[1])
core = importlib.util.module_from_spec(importlib.util.spec_from_loader("shardwright._core", loader))
loader.exec_module(core)
assert core.__file__ == sys.argv[1] and core.Topology(2, 2, 1, "cluster"), core
print(sys.version.split()[0])
"""
_RUN = """#!/bin/sh
# Runs the steps of the GPU's day with this machine's python3, wherever the pack lies; arguments: --only STEP,...
if [ -n "$OUT" ]; then
    mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd) || exit 1
    export OUT
fi
cd "$(dirname "$0")" || exit 1
pack=$(pwd)
export PYTHONPATH="$pack/python:$pack" SHARDWRIGHT_TESTS_REHEARSAL="$pack/LIBRARY" PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
# Packages that the machine may lack, used only if it lacks one: those of a machine suit its other packages.
"$python" -c "import IMPORTS" 2>/dev/null || export PYTHONPATH="$PYTHONPATH:$pack/site"
exec "$python" -m tools.gpu_day "$@"
""".replace("LIBRARY", _REHEARSAL).replace("IMPORTS", ", ".join(_IMPORTS))


def main() -> int:
    """Build, gather, check; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_day.pack", description=__doc__)
    parser.add_argument("--into", type=Path, default=ROOT / "target" / "gpu-pack", help="the pack's folder, made anew")
    parser.add_argument("--python", action="append", default=[], help="another interpreter that has to load it")
    given = parser.parse_args()
    pack = given.into.resolve()
    _gather(pack)
    _build(pack)
    size = sum(path.stat().st_size for path in pack.rglob("*") if path.is_file())
    loaded = [_loaded_by(python, pack / _EXTENSION) for python in (sys.executable, *given.python)]
    where = pack.relative_to(ROOT) if pack.is_relative_to(ROOT) else pack
    figures = {
        "mib": round(size / 2**20, 2),
        "extension_mib": round((pack / _EXTENSION).stat().st_size / 2**20, 2),
        "glibc": glibc_of(pack / _EXTENSION),
        "loaded_by": loaded,
        "commit": (pack / "COMMIT").read_text().strip(),
    }
    print(f"sh {where}/run")
    print(json.dumps(figures))
    if size >= MAX_BYTES:
        print(f"gpu-pack: {size} bytes; at most {MAX_BYTES}", file=sys.stderr)
        return 1
    return 0


def _gather(pack: Path) -> None:
    """Copy what travels: what git knows and what it does not ignore, so that nothing stale comes along."""
    listed = _said("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", *_TRAVELS)
    shutil.rmtree(pack, ignore_errors=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # else it is deleted, and not committed yet
            (pack / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, pack / name)
    for name in _DISTRIBUTIONS:
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or ():
            if ".." not in file.parts and file.suffix != ".pyc":
                (pack / "site" / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(distribution.locate_file(file), pack / "site" / file)
    changed = "-changed" if _said("git", "status", "--porcelain", "--", *_TRAVELS, "crates").strip() else ""
    (pack / "COMMIT").write_text(f"{_said('git', 'rev-parse', 'HEAD').strip()}{changed}\n")
    (pack / "run").write_text(_RUN)
    (pack / "run").chmod(0o755)


def _build(pack: Path) -> None:
    """Build the extension and the stand-in into the pack, without symbols for debuggers."""
    subprocess.run([ROOT / "tools" / "build.sh", pack / _EXTENSION, "release", ""], check=True)
    build = ["cargo", "build", "--release", "--quiet", "--locked", "--package", "shardwright-cuda-rehearsal"]
    subprocess.run([*build, "--target-dir", "target"], cwd=ROOT, check=True)
    shutil.copyfile(ROOT / "target" / "release" / _REHEARSAL, pack / _REHEARSAL)
    for library in (pack / _EXTENSION, pack / _REHEARSAL):
        subprocess.run(["strip", "--strip-unneeded", library], check=True)


def glibc_of(library: Path) -> str:
    """The oldest version of the C library with which a library loads."""
    versions = {(int(major), int(minor)) for major, minor in _GLIBC.findall(library.read_bytes())}
    return ".".join(map(str, max(versions)))


def _loaded_by(python: str, extension: Path) -> str:
    """The version of an interpreter, in which the extension loads."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [python, "-I", "-c", _LOAD, str(extension)]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def _said(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
