"""A rank of ``python -m shardwright.verify`` computes on the device that the job has given it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from shardwright.job.place import Place
from shardwright.verify import rank
from torch import nn

SCRIPT = """
import shardwright as smp, torch
def build():
    return torch.nn.Linear(2, 2), smp.step(lambda model, x: model(x)), torch.ones(2, 2)
"""


class Wrapped(Exception):
    """Carries what was to be wrapped."""


class Wrapping:
    """In the place of ``smp.DistributedModel``."""

    def __init__(self, module: nn.Module, **_: Any) -> None:
        raise Wrapped(next(module.parameters()).device)


@pytest.fixture
def _leaving() -> Iterator[None]:
    yield
    smp.shutdown()


@pytest.mark.usefixtures("_leaving")
def test_ranks_that_share_a_device_are_verified_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks on a host with one GPU, the second has no device of its local rank's number."""

    (tmp_path / "script.py").write_text(SCRIPT)
    given = {"pp": 1, "dp": 1, "microbatches": 1, "pipeline": "simple", "config": {}, "dtype": "float64", "seed": 0}
    options = tmp_path / "options.json"
    options.write_text(json.dumps(given | {"target": f"{tmp_path / 'script.py'}:build"}))
    monkeypatch.setattr(Place, "device", torch.device("meta"))
    monkeypatch.setattr(smp, "DistributedModel", Wrapping)
    with pytest.raises(Wrapped) as found:
        rank.main(str(options))
    assert found.value.args == (torch.device("meta"),)
