"""The distribution with the old import path: what is in it, and that it does not mix with another one."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import shardwright

from tests.jobs.forked import ROOT
from tests.jobs.patience import HANG_SECONDS

COMPAT = ROOT / "compat"
PACKAGE = COMPAT / "smdistributed" / "modelparallel"
BUILD = "import backend, sys; print(backend.build_wheel(sys.argv[1]))"
IMPORT = "import smdistributed.modelparallel.torch as smp; print(smp.__version__, smp.DistributedModel.__module__)"


def python(*command: str | Path, paths: list[Path], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python with these folders on its search path."""
    path = os.pathsep.join(str(one) for one in (*paths, ROOT / "python"))
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built of a copy of the folder."""
    folder = tmp_path_factory.mktemp("built")
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "compat"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    for name in tracked:
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    built = python("-c", BUILD, folder, paths=[folder / "compat"], folder=folder / "compat")
    assert built.returncode == 0, built.stderr
    return folder / built.stdout.split()[-1]


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    modules = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")} | {"py.typed"}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = next(archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
    assert names == {f"smdistributed/modelparallel/{name}" for name in modules}
    assert f"Requires-Dist: shardwright=={shardwright.__version__}" in metadata
    assert f"Version: {shardwright.__version__}\n" in metadata


def test_the_package_knows_its_own_modules() -> None:
    known = "from smdistributed.modelparallel._alone import MODULES; print(*sorted(MODULES))"
    done = python("-c", known, paths=[COMPAT])
    found = sorted(path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py"))
    assert done.stdout.split() == found


def test_what_is_installed_from_the_wheel_is_imported(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    beside = tmp_path / "smdistributed" / "dataparallel"  # a part of the namespace that is nobody's concern
    beside.mkdir()
    beside.joinpath("__init__.py").write_text("name = 'beside'\n")
    done = python("-c", f"{IMPORT}; import smdistributed.dataparallel as d; print(d.name)", paths=[tmp_path])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1.15.0", "shardwright.model.distributed", "beside"]


@pytest.mark.parametrize("name", ["torch/server.py", "backend/core.so", "torch/__init__.pyc"])
def test_files_of_another_package_in_the_same_folder_are_refused(wheel: Path, tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    other = tmp_path / "smdistributed" / "modelparallel" / name
    other.write_bytes(b"")
    done = python("-c", IMPORT, paths=[tmp_path])
    assert done.returncode == 1
    assert f"another package ({other})" in done.stderr
    assert "uninstall" in done.stderr


def test_another_package_elsewhere_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "smdistributed" / "modelparallel"
    other.mkdir(parents=True)
    done = python("-c", IMPORT, paths=[COMPAT, tmp_path])
    assert done.returncode == 1
    assert f"another package ({other})" in done.stderr


def test_it_is_not_built_over_another_package(tmp_path: Path) -> None:
    (tmp_path / "other" / "smdistributed" / "modelparallel").mkdir(parents=True)
    done = python("-c", BUILD, tmp_path, paths=[COMPAT, tmp_path / "other"])
    assert done.returncode == 1
    assert "belongs to another package" in done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_the_main_distribution_offers_it_as_an_extra_and_has_no_part_of_it() -> None:
    main = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert main["project"]["optional-dependencies"]["smdistributed"] == ["shardwright-smdistributed"]
    assert main["tool"]["maturin"]["python-source"] == "python"
    assert not (ROOT / "python" / "smdistributed").exists()
