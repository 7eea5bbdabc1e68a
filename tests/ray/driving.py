"""What the driver of a case does: a cluster of its own, trainers, and what their workers have told."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
import ray.data
import ray.train
from ray.train.torch import TorchTrainer

from tests.ray import loops
from tests.ray.plain import rows

CPUS, STORE_BYTES = 4, 100 << 20
#: How often a cluster may be started in vain.
STARTS = 5


@contextlib.contextmanager
def cluster(folder: Path, cpus: int = CPUS) -> Iterator[None]:
    """A Ray cluster of this process alone, which leaves nothing outside of the folder."""
    for attempt in range(STARTS):
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                num_cpus=cpus,
                object_store_memory=STORE_BYTES,
                _temp_dir=str(folder / "ray"),
            )
            break
        except Exception:  # Ray's own processes have 15 seconds to start, on however slow a machine
            ray.shutdown()
            if attempt == STARTS - 1:
                raise
    try:
        yield
    finally:
        ray.shutdown()


def trainer(
    loop: Callable[..., Any],
    folder: Path,
    workers: Any,
    config: dict[str, Any],
    *,
    name: str = "run",
    failures: int = 0,
    **others: Any,
) -> TorchTrainer:
    """A trainer whose storage and whose workers' words are in the folder."""
    (folder / name).mkdir(exist_ok=True)
    return TorchTrainer(
        loops.run,
        train_loop_config={"folder": str(folder / name), "loop": loop.__name__, **config},
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=str(folder / "storage"),
            failure_config=ray.train.FailureConfig(max_failures=failures),
        ),
        **others,
    )


def told(folder: Path, rank: int = 0, name: str = "run") -> list[dict[str, Any]]:
    """What a rank has told, line by line; of all attempts."""
    path = folder / name / f"rank{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def data_set(count: int, *, blocks: int = 6) -> Any:
    """The rows as a data set of Ray, in several blocks."""
    given = [{"row": row.numpy()} for row in rows(count)]
    return ray.data.from_items(given, override_num_blocks=blocks)


def in_order() -> Any:
    """Ray's options by which rows keep their order, so that a training can be held to a plain one."""
    options = ray.data.ExecutionOptions()
    options.preserve_order = True
    return options
