"""Work that all ranks of a job do, and whose failure on one is told on all."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeVar

from shardwright._core import CheckpointWriter
from shardwright.errors import CheckpointError, CheckpointGoneError, FrameError, ShardwrightError
from shardwright.job.objects import gathered
from shardwright.job.ranks import WORLD
from shardwright.job.runtime import Runtime, current_runtime
from shardwright.model import DistributedModel
from shardwright.model.models import Models
from shardwright.optimizer import DistributedOptimizer

#: How long a save waits for one of another job into the same directory.
_LOCK_SECONDS = 60.0

T = TypeVar("T")


def on_all_ranks(operation: str, work: Callable[[], T]) -> list[T]:
    """Do something on every rank, and return what each of them got; all ranks call this.

    Raises:
        CheckpointError: It failed on a rank.
        CheckpointGoneError: On each rank where it failed, a checkpoint went while it was read.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    problem = None if error is None else _told(error)
    is_passing = isinstance(error, CheckpointGoneError)
    told = gathered(operation, (problem, socket.gethostname(), is_passing, result), WORLD)
    problems = {rank: (text, host) for rank, (text, host, *_) in enumerate(told) if text is not None}
    if problems:
        ranks = "all ranks" if len(problems) == len(told) > 1 else f"rank {min(problems)}"
        text, host = problems[min(problems)]
        kind = CheckpointGoneError if all(told[rank][2] for rank in problems) else CheckpointError
        raise kind(f"{operation} failed on {ranks} (host {host!r}): {text}") from error
    return [result for *_, result in told]


def keep_others_out(operation: str, writer: CheckpointWriter, rank: int) -> None:
    """Keep other jobs from saving into the writer's directory until rank 0 unlocks it; all ranks call this.

    Raises:
        CheckpointError: Another job has been saving into it for a minute.
    """
    on_all_ranks(operation, lambda: writer.lock(_LOCK_SECONDS) if rank == 0 else None)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, ShardwrightError) else f"{type(error).__name__}: {error}"


def outside_steps(operation: str) -> Runtime:
    """Return the runtime of this rank.

    Raises:
        FrameError: A step runs.
    """
    runtime = current_runtime()
    runtime.check_process(operation)
    if runtime.step.running:
        raise FrameError(
            f"{operation} was called inside a step function, which runs once per microbatch: call it between steps"
        )
    return runtime


def model_of(runtime: Runtime, given: Any) -> DistributedModel:
    """Return the model that is meant: the given one, or the job's only one.

    Raises:
        ShardwrightError: There is none, or there are several.
    """
    if given is None:
        models = runtime[Models].alive
        if len(models) != 1:
            raise ShardwrightError(
                f"the job has {len(models)} models; "
                + ("wrap one by smp.DistributedModel first" if not models else "say which is meant by model=...")
            )
        given = models[0]
    if not isinstance(given, DistributedModel):
        raise ShardwrightError(f"model is a {type(given).__name__}; allowed: a smp.DistributedModel, or None")
    return given


def optimizer_of(runtime: Runtime, model: DistributedModel, given: Any) -> DistributedOptimizer | None:
    """Return the optimizer that is meant: the given one, or the only one that trains the model; None without one.

    Raises:
        ShardwrightError: There are several.
    """
    if given is None:
        optimizers = [one for one in runtime[Models].optimizers if one.trains(model)]
        if len(optimizers) > 1:
            raise ShardwrightError("several optimizers train the model: say which is meant by optimizer=...")
        given = optimizers[0] if optimizers else None
    if given is not None and not isinstance(given, DistributedOptimizer):
        raise ShardwrightError(
            f"optimizer is a {type(given).__name__}; allowed: what smp.DistributedOptimizer returned, or None"
        )
    return given
