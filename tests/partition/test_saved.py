"""A partition that was written to a file is taken from it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from shardwright.errors import PartitionError
from shardwright.partition.decide import divide
from shardwright.partition.manual import set_partition
from shardwright.partition.saved import partition_path, write_partition
from torch import nn

CFG: Any = SimpleNamespace(auto_partition=True, default_partition=0, memory_weight=0.8, refine_partition=False)


def built(width: int = 4, layers: int = 4) -> nn.Sequential:
    """Layers of which each has a part without parameters, and one a part elsewhere than itself."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)) for _ in range(layers))
    )


def test_a_saved_partition_is_taken_whatever_the_cost_says(tmp_path: Path) -> None:
    model, path = built(), str(tmp_path / "partition.json")
    for name, rank in (("0", 1), ("0.2", 0), ("1", 0), ("2", 1), ("3", 1)):
        set_partition(model.get_submodule(name), rank)
    written = divide(model, None, CFG, 2)
    write_partition(path, written)
    again = divide(built(), None, CFG, 2, path)
    assert again.modules == written.modules
    assert again.parameters == written.parameters
    assert again.follows == written.follows
    assert again.modules != divide(built(), None, CFG, 2).modules


def test_a_file_of_another_model_or_degree_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "partition.json")
    with pytest.raises(PartitionError, match="cannot be read: No such file"):
        divide(built(), None, CFG, 2, path)
    write_partition(path, divide(built(), None, CFG, 2))
    with pytest.raises(PartitionError, match="is for pipeline_parallel_degree 2, and the job has 3"):
        divide(built(), None, CFG, 3, path)
    with pytest.raises(PartitionError, match="is of another model: only the model has a module '4'"):
        divide(built(layers=5), None, CFG, 2, path)
    Path(path).write_text("{}")
    with pytest.raises(PartitionError, match="is not what this library writes"):
        divide(built(), None, CFG, 2, path)
    with pytest.raises(PartitionError, match="cannot be written"):
        write_partition(str(tmp_path / "nowhere" / "file"), divide(built(), None, CFG, 2))


def test_each_model_has_a_file_of_its_own() -> None:
    cfg = SimpleNamespace(partition_file="p")
    assert [partition_path(cfg, number) for number in range(2)] == ["p", "p.1"]
    assert partition_path(SimpleNamespace(partition_file=None), 0) is None
