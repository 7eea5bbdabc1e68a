"""``smp.save`` and ``smp.load``: safe files, read by others, and files of others."""

from __future__ import annotations

import json
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import shardwright as smp
import torch
from safetensors.torch import load_file, save_file
from shardwright.errors import CheckpointError, ConfigError, UnsupportedValueError
from torch import nn


def path_in(folder: Path, name: str = "file") -> str:
    """A path as ``smp.save`` takes it."""
    return str(folder / name)


def test_a_value_comes_back(tmp_path: Path) -> None:
    value: Any = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(3)}},
        "groups": [{"betas": (0.9, 0.1)}],
    }
    smp.save(value, path_in(tmp_path), partial=False)
    found = smp.load(path_in(tmp_path), partial=False)
    assert found["groups"] == value["groups"]
    assert torch.equal(found["state"][0]["exp_avg"], value["state"][0]["exp_avg"])
    assert os.listdir(tmp_path) == ["file"]


def test_state_dicts_are_read_by_others(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).bfloat16()
    module.tied = module[0]
    smp.save(module.state_dict(), path_in(tmp_path), partial=False)
    others = load_file(path_in(tmp_path))
    assert torch.equal(others["0.weight"], module[0].weight)
    found = smp.load(path_in(tmp_path), partial=False)
    assert type(found) is OrderedDict
    assert list(found) == list(module.state_dict())
    module.load_state_dict(found)


def test_files_of_safetensors_are_read(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(2, 3), "b": torch.zeros(0, dtype=torch.int8), "c": torch.tensor(True)}
    save_file(tensors, path_in(tmp_path))
    found = smp.load(path_in(tmp_path), partial=False)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], one) for name, one in tensors.items())


@pytest.mark.parametrize("legacy", [False, True])
def test_files_of_torch_are_read_without_running_code(tmp_path: Path, legacy: bool) -> None:
    torch.save({"a": torch.ones(2), "b": [1, "x"]}, path_in(tmp_path), _use_new_zipfile_serialization=not legacy)
    found = smp.load(path_in(tmp_path), partial=False)
    assert torch.equal(found["a"], torch.ones(2))
    assert found["b"] == [1, "x"]


class Harmful:
    """Runs code when it is read."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["HARMFUL"],)


@pytest.mark.parametrize("writer", ["zip", "legacy", "pickle"])
def test_other_pickles_are_refused_and_do_nothing(tmp_path: Path, writer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARMFUL", str(tmp_path / "made"))
    if writer == "pickle":
        Path(path_in(tmp_path)).write_bytes(pickle.dumps(Harmful()))
    else:
        torch.save(Harmful(), path_in(tmp_path), _use_new_zipfile_serialization=writer == "zip")
    with pytest.raises(CheckpointError, match="refused"):
        smp.load(path_in(tmp_path), partial=False)
    assert not (tmp_path / "made").exists()


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    """Cut at any place."""
    path = Path(path_in(tmp_path))
    smp.save({"a": torch.arange(4), "b": 1}, str(path), partial=False)
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError):
            smp.load(str(path), partial=False)
    with pytest.raises(CheckpointError, match="No such file"):
        smp.load(path_in(tmp_path, "other"), partial=False)


def test_a_failed_save_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    smp.save(1, path_in(tmp_path), partial=False)
    with pytest.raises(UnsupportedValueError, match=r"value is an object"):
        smp.save(object(), path_in(tmp_path), partial=False)
    with pytest.raises(CheckpointError, match="No such file"):
        smp.save(1, path_in(tmp_path, "nowhere/file"), partial=False)
    assert smp.load(path_in(tmp_path), partial=False) == 1
    assert os.listdir(tmp_path) == ["file"]


def test_a_path_is_a_string(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="f is a PosixPath; allowed: a str"):
        smp.save(1, tmp_path / "file", partial=False)  # type: ignore[arg-type]


def test_names_of_parts_say_whose_they_are(tmp_path: Path) -> None:
    smp.init({})
    try:
        smp.save([1], path_in(tmp_path))
        smp.save([2], path_in(tmp_path), v3=True)
        assert sorted(os.listdir(tmp_path)) == ["file_0_0", "file_0_0_0"]
        assert smp.load(path_in(tmp_path)) == [1]
        assert smp.load(path_in(tmp_path), v3=True) == [2]
    finally:
        smp.shutdown()


def test_arguments_of_pickle_are_taken_where_they_mean_nothing_and_refused_where_they_would(tmp_path: Path) -> None:
    smp.save(1, path_in(tmp_path), False, pickle, 2)
    assert smp.load(path_in(tmp_path), partial=False, pickle_module=pickle) == 1
    with pytest.raises(ConfigError, match=r"smp\.save: pickle_module is <module 'json'"):
        smp.save(1, path_in(tmp_path), False, pickle_module=json)
    with pytest.raises(ConfigError, match=r"smp\.load: pickle_module is <module 'json'"):
        smp.load(path_in(tmp_path), partial=False, pickle_module=json)
    with pytest.raises(ConfigError, match=r"smp\.load: encoding, fix_imports would go to pickle"):
        smp.load(path_in(tmp_path), partial=False, fix_imports=True, encoding="bytes")
