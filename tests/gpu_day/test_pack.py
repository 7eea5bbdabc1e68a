"""The pack for a GPU machine without cargo: what is in it, and how it is started there."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.forked import ROOT
from tests.jobs.patience import HANG_SECONDS
from tools.gpu_day import pack
from tools.gpu_day.plan import PLAN


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack, as yet without what cargo builds."""
    folder = tmp_path_factory.mktemp("elsewhere") / "pack"
    folder.mkdir()
    (folder / "stale.py").touch()
    pack._gather(folder)
    return folder


def test_a_pack_has_all_that_the_project_has_and_nothing_that_git_ignores(packed: Path) -> None:
    names = {path.relative_to(packed).as_posix() for path in packed.rglob("*") if path.is_file()}
    assert {"run", "COMMIT", "pyproject.toml", "python/shardwright/__init__.py"} <= names
    assert {"tests/jobs/fork_server.py", "tests/device/transfer_job.py", "tools/gpu_day/hook/sitecustomize.py"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc")) or name == "stale.py"]
    assert sum(path.stat().st_size for path in packed.rglob("*") if path.is_file()) < 20 << 20


@pytest.mark.parametrize("lacks", [False, True], ids=["as it is", "lacks a package"])
def test_it_starts_from_any_folder_with_its_own_modules_and_writes_where_it_is_asked_to(
    lacks: bool, packed: Path, tmp_path: Path
) -> None:
    (tmp_path / "python").write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exit {int(lacks)}\nprintf "%s\\n" "$(pwd)" "$PYTHONPATH" "$OUT" "$@"\n'
    )
    (tmp_path / "python").chmod(0o755)
    done = subprocess.run(
        ["sh", str(packed / "run"), "--only", "nccl"],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "OUT": "results/of_today", "PYTHON": str(tmp_path / "python")},
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_SECONDS,
    )
    there, paths, out, *arguments = done.stdout.splitlines()
    assert there == str(packed)
    added = [str(packed / "site")] if lacks else []
    assert paths.split(":") == [str(packed / "python"), str(packed), *added]
    assert out == str(tmp_path / "results/of_today")
    assert arguments == ["-m", "tools.gpu_day", "--only", "nccl"]


def test_what_the_steps_import_comes_along_for_a_machine_without(packed: Path) -> None:
    found = "import pytest, pytest_timeout, xdist, rich.table; print(pytest.__file__, rich.__file__)"
    plugins = "from importlib.metadata import entry_points as e; print(sorted(p.name for p in e(group='pytest11')))"
    done = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.append({str(packed / 'site')!r}); {found}; {plugins}",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_SECONDS,
    )
    files, names = done.stdout.splitlines()
    assert all(name.startswith(str(packed)) for name in files.split())
    assert {"timeout", "xdist"} <= set(ast.literal_eval(names))


def test_the_oldest_c_library_is_the_newest_of_the_versions_that_an_extension_asks_for(tmp_path: Path) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(b"\0GLIBC_2.9\0GLIBC_2.34\0GLIBC_2.2.5\0GLIBC_PRIVATE\0")
    assert pack.glibc_of(library) == "2.34"


def test_every_step_of_the_plan_is_in_the_documentation() -> None:
    rows = (ROOT / "docs/measurements/gpu/README.md").read_text()
    assert [each.name for each in PLAN if f"| `{each.name}` |" not in rows] == []
    assert all((ROOT / "tools/gpu_day/steps" / f"{each.name}.py").exists() for each in PLAN)
