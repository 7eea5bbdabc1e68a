"""Trackers: a job of several ranks is one run of TensorBoard, W&B (offline), MLflow and Trackio, whoever trains."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.stacks.layouts import LAYOUTS, RANKS

#: Of the libraries that train, those that have each tracker.
TRACKERS = {
    "tensorboard": ("transformers", "accelerate", "lightning"),
    "wandb": ("transformers", "accelerate", "lightning"),
    "mlflow": ("transformers", "accelerate", "lightning"),
    "trackio": ("transformers", "accelerate"),
}


def cases() -> list[tuple[str, str, str, int]]:
    """Library, tracker, layout and number of microbatches."""
    found = []
    for number, (tracker, library) in enumerate(
        (tracker, library) for tracker, libraries in TRACKERS.items() for library in libraries
    ):
        # Ranks of a pipeline and replicas are told apart in different places.
        found += [(library, tracker, layout, 4 if number % 2 else 1) for layout in ("pp2", "dp2")]
    return found


def outcome(
    library: str, tracker: str, layout: str, microbatches: int, folder: Path, seconds: float
) -> tuple[str, str]:
    """What became of a training, and what the tracker has of it."""
    folder.mkdir(parents=True)
    environment = {
        **os.environ,
        "JOB": json.dumps({**LAYOUTS[layout], "microbatches": microbatches}),
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "TRACKIO_DIR": str(folder / "trackio"),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS[layout]}"]
    given = ["-m", "tests.stacks.trackers_rank", library, tracker, str(folder)]
    with Path(folder, "output").open("w") as output:
        process = subprocess.Popen([*command, *given], stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks
            process.wait()
            return "hung", ""
    if process.returncode:
        return "wrong", Path(folder, "output").read_text()[-2000:]
    runs = _RUNS[tracker](folder)
    said = f"{len(runs)} run{'s' * (len(runs) != 1)}"
    return ("exact" if len(runs) == 1 else "wrong"), said


def _of_tensorboard(folder: Path) -> list[str]:
    """Files of events with a loss; a run may have one of hyperparameters beside it."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = []
    for path in (folder / "tensorboard").rglob("events.out.tfevents.*"):
        tags = EventAccumulator(str(path)).Reload().Tags()
        found += [str(path)] * any("loss" in tag for tag in (*tags["scalars"], *tags["tensors"]))
    return found


def _of_wandb(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("offline-run-*") if path.is_dir()]


def _of_mlflow(folder: Path) -> list[str]:
    return _rows(folder / "mlflow.db", "SELECT run_uuid FROM runs")


def _of_trackio(folder: Path) -> list[str]:
    paths = [path for path in (folder / "trackio").rglob("*.db")]
    return [run for path in paths for run in _rows(path, "SELECT DISTINCT run_name FROM metrics")]


def _rows(path: Path, query: str) -> list[str]:
    connection = sqlite3.connect(path)
    try:
        return [row[0] for row in connection.execute(query)]
    finally:
        connection.close()


_RUNS: dict[str, Callable[[Path], list[str]]] = {
    "tensorboard": _of_tensorboard,
    "wandb": _of_wandb,
    "mlflow": _of_mlflow,
    "trackio": _of_trackio,
}
