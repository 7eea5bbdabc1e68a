"""What accelerate knows of a process: its place among those that get different samples."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from shardwright.errors import ConfigError
from shardwright.job.ranks import data_group, group_ranks, local_rank, rank, size
from shardwright.job.runtime import Runtime, current_runtime, find_runtime
from shardwright.patches import replaced


def started(what: str) -> Runtime:
    """Return the runtime of this rank.

    Raises:
        ConfigError: ``smp.init`` has not been called.
    """
    if find_runtime() is None:
        raise ConfigError(
            f"{what} before smp.init: begin the script with `import shardwright as smp` and "
            'smp.init({"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": True}), with the degrees of the job'
        )
    return current_runtime()


def take_seat(runtime: Runtime) -> PartialState:
    """Tell accelerate that this process is one of as many as there are ranks with different samples.

    Ranks of one pipeline have the same number, so that they read the same batches. Accelerate itself takes no part in
    communication: for it, the process is alone.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    place = runtime.place
    ranks = group_ranks(data_group())
    PartialState._shared_state.update(
        _cpu=place.device.type == "cpu",
        backend=None,
        debug=False,
        device=place.device,
        distributed_type=DistributedType.NO,
        fork_launched=False,
        num_processes=len(ranks),
        process_index=ranks.index(place.rank),
        local_process_index=local_rank(),
    )
    runtime.installed.enter_context(replaced(PartialState, _OF_JOB))
    return PartialState()


class _Replaced(property):
    """A property that can say what it replaces."""


def _runs_where(is_there: Callable[[PartialState], bool]) -> Callable[..., Any]:
    """A decorator that lets a function run on some ranks only, though accelerate takes each for alone."""

    def decorator(state: PartialState, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if is_there(state) else _do_nothing

    return decorator


def _runs_on(state: PartialState, function: Any = None, process_index: int | None = None) -> Any:
    """Let a function run on the first of the ranks that have the samples with this number."""
    if function is None:
        return partial(_runs_on, state, process_index=process_index)
    return function if state.process_index == process_index and 0 in group_ranks(data_group()) else _do_nothing


def _runs_on_local(state: PartialState, function: Any = None, local_process_index: int | None = None) -> Any:
    """Let a function run on the rank with this number on its host."""
    if function is None:
        return partial(_runs_on_local, state, local_process_index=local_process_index)
    return function if local_rank() == local_process_index else _do_nothing


def _destroy_process_group(state: PartialState, group: Any = None) -> None:
    """Destroy a group that a script has made; the job's own end with the job, and not with a training."""
    if group is not None and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group(group)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Be called in the place of a function that runs on other ranks."""


#: What scripts ask of a process, to write or print once: of all ranks of a job, not only of those with other samples.
#: Trackers (TensorBoard, W&B, ...) ask too: a run is that of rank 0.
_OF_JOB = {
    "is_main_process": _Replaced(lambda state: rank() == 0),
    "is_local_main_process": _Replaced(lambda state: local_rank() == 0),
    "is_last_process": _Replaced(lambda state: rank() == size() - 1),
    "on_main_process": _runs_where(lambda state: rank() == 0),
    "on_local_main_process": _runs_where(lambda state: local_rank() == 0),
    "on_last_process": _runs_where(lambda state: rank() == size() - 1),
    "on_process": _runs_on,
    "on_local_process": _runs_on_local,
    "destroy_process_group": _destroy_process_group,
}


def refuse_other_engines() -> None:
    """Raise :class:`ConfigError` if accelerate was told by the environment to divide the model in its own way."""
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM"):
        if os.environ.get(name, "false").lower() == "true":
            raise ConfigError(
                f"{name} is set, and the model is divided by smp.DistributedModel: start the script with torchrun, or "
                "with an accelerate configuration that has neither DeepSpeed, FSDP nor Megatron-LM"
            )
