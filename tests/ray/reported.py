"""Two ranks report a checkpoint and resume from it, with a stand-in for Ray Train that notes what it is told.

Each says in a line what it has seen.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import shardwright as smp
import torch
from torch import nn


class Checkpoint:
    """Stands for Ray's: a path and a file system."""

    def __init__(self, path: str, filesystem: Any) -> None:
        self.path, self.filesystem = path, filesystem


class Storage:
    """Stands for the storage of a run."""

    storage_filesystem = types.SimpleNamespace(type_name="local")
    names = 0

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make_default_checkpoint_dir_name(self) -> str:
        Storage.names += 1
        return f"checkpoint_{smp.rank()}_{Storage.names}"  # as where the clocks of hosts differ

    def build_checkpoint_path_from_name(self, name: str) -> str:
        return str(self.folder / name)


def stand_in(folder: Path) -> types.ModuleType:
    """A module in the place of ``ray.train``, whose ``told`` has what was reported."""
    module = types.ModuleType("ray.train")
    storage = Storage(folder)
    module.told = []  # type: ignore[attr-defined]
    module.DataConfig = object  # type: ignore[attr-defined]
    module.Checkpoint = Checkpoint  # type: ignore[attr-defined]
    module.CheckpointUploadMode = types.SimpleNamespace(NO_UPLOAD="as it is")  # type: ignore[attr-defined]
    module.CheckpointConsistencyMode = types.SimpleNamespace(COMMITTED="noted")  # type: ignore[attr-defined]
    module.get_context = lambda: types.SimpleNamespace(get_storage=lambda: storage)  # type: ignore[attr-defined]
    module.report = lambda metrics, **how: module.told.append((metrics, how))  # type: ignore[attr-defined]
    module.get_all_reported_checkpoints = lambda **how: module.told.append(how)  # type: ignore[attr-defined]

    def get_checkpoint() -> Checkpoint | None:
        """As Ray's: only the rank that has reported one knows of it."""
        known = [one[1]["checkpoint"] for one in module.told if isinstance(one, tuple)]
        return known[-1] if known else None

    module.get_checkpoint = get_checkpoint  # type: ignore[attr-defined]
    return module


def main() -> None:
    train = stand_in(Path(sys.argv[1]))
    package = types.ModuleType("ray")
    package.train = train  # type: ignore[attr-defined]
    sys.modules.update({"ray": package, "ray.data": types.ModuleType("ray.data"), "ray.train": train})
    import shardwright.ray

    smp.init({"pipeline_parallel_degree": 2, "microbatches": 2})

    @smp.step
    def train_step(model: Any, inputs: torch.Tensor) -> torch.Tensor:
        loss = model(inputs).square().mean()
        model.backward(loss)
        return loss

    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
        return model, smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))

    def stepped(model: Any, optimizer: Any) -> float:
        optimizer.zero_grad()
        loss = float(train_step(model, torch.ones(4, 4)).reduce_mean())
        optimizer.step()
        return loss

    found: dict[str, Any] = {}
    model, optimizer = made()
    found["none"] = shardwright.ray.resume(model=model, optimizer=optimizer)
    stepped(model, optimizer)
    shardwright.ray.report({"loss": 1.0}, user_content={"step": 1}, model=model, optimizer=optimizer)
    metrics, how = train.told[0]
    found["metrics"] = metrics
    found["checkpoint"] = None if how["checkpoint"] is None else Path(how["checkpoint"].path).name
    found["name"] = how["checkpoint_dir_name"]
    found["mode"] = how["checkpoint_upload_mode"]
    found["then"] = train.told[1]
    found["is there"] = (Path(sys.argv[1]) / how["checkpoint_dir_name"] / "shardwright_partial").is_dir()
    uninterrupted = stepped(model, optimizer)
    model, optimizer = made()
    found["content"] = shardwright.ray.resume(model=model, optimizer=optimizer)
    found["goes on alike"] = stepped(model, optimizer) == uninterrupted
    Storage.storage_filesystem.type_name = "gcs"
    try:
        shardwright.ray.report({}, model=model, optimizer=optimizer)
    except smp.ConfigError as error:
        found["other storage"] = str(error)
    print(json.dumps(found), flush=True)
    smp.shutdown()


if __name__ == "__main__":
    main()
