"""What the package shows to the outside: its names, its types, and an import that changes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import pytest
import shardwright as smp

from tests.jobs.forked import ROOT
from tests.jobs.patience import HANG_SECONDS

NAMES = Path(__file__).with_name("public_names.txt")

WATCHED_IMPORT = """
import json, logging, os, signal, sys, threading
import torch, numpy
import torch.utils.checkpoint  # which imports sympy in torch 2.7
before = dict(os.environ), threading.active_count(), [signal.getsignal(s) for s in signal.valid_signals()]
modules = set(sys.modules)
import shardwright
after = dict(os.environ), threading.active_count(), [signal.getsignal(s) for s in signal.valid_signals()]
print(json.dumps({
    "same": before == after,
    "handlers": len(logging.getLogger("shardwright").handlers) + len(logging.getLogger().handlers),
    "process_group": torch.distributed.is_initialized(),
    "slow": sorted({"rich", "sympy", "torch._dynamo", "transformers", "triton"} & (sys.modules.keys() - modules)),
}))
"""

FIRST_TABLE = """
import random, sys
from types import SimpleNamespace
import torch
from shardwright.partition.decide import decide
from shardwright.partition.report import announce
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
settings = SimpleNamespace(auto_partition=True, default_partition=0, memory_weight=0.8, skip_tracing=True)
decision = decide(model, lambda: model(torch.ones(1, 2)), settings, 2)
assert not any(name.split(".")[0] == "rich" for name in sys.modules)
before = random.getstate()
announce(decision)
assert "rich.style" in sys.modules
print(random.getstate() == before)
"""


def test_the_public_names_are_those_written_down() -> None:
    assert sorted(smp.__all__) == NAMES.read_text().split()


@pytest.mark.parametrize("name", smp.__all__)
def test_every_public_name_exists_and_is_documented(name: str) -> None:
    value = getattr(smp, name)
    assert not callable(value) or value.__doc__


def test_importing_changes_nothing() -> None:
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", WATCHED_IMPORT], capture_output=True, text=True, timeout=HANG_SECONDS, env=environment
    )
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    assert seen == {"same": True, "handlers": 0, "process_group": False, "slow": []}
    assert result.stderr == ""


def test_the_first_table_which_one_rank_prints_leaves_random_numbers_alone() -> None:
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", FIRST_TABLE], capture_output=True, text=True, timeout=HANG_SECONDS, env=environment
    )
    assert (result.returncode, result.stdout) == (0, "True\n"), result.stderr
    assert "Partition assignments" in result.stderr


def test_the_package_says_that_it_is_typed() -> None:
    package = resources.files("shardwright")
    assert package.joinpath("py.typed").is_file()
    assert package.joinpath("_core.pyi").is_file()


def features_of_the_extension(*arguments: str) -> list[str]:
    """The features of the crates that the extension is built of."""
    command = ["cargo", "tree", "--package", "shardwright-py", "--locked", "--edges", "normal", "--format", "{lib} {f}"]
    listed = subprocess.run([*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    return listed.replace(",", " ").split()


def test_wheels_are_built_without_the_faults_that_tests_inject() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["maturin"]
    assert set(build) == {"manifest-path", "python-source", "module-name"}, "further settings may add features"
    assert "faults" not in features_of_the_extension()
    assert features_of_the_extension("--features", "faults").count("faults") > 1
