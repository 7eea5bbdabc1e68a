"""What accelerate knows of a process: its place among those that get different samples."""

from __future__ import annotations

import os

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


#: What scripts ask of a process, to write or print once: of all ranks of a job, not only of those with other samples.
_OF_JOB = {
    "is_main_process": _Replaced(lambda state: rank() == 0),
    "is_local_main_process": _Replaced(lambda state: local_rank() == 0),
    "is_last_process": _Replaced(lambda state: rank() == size() - 1),
}


def refuse_other_engines() -> None:
    """Raise :class:`ConfigError` if accelerate was told by the environment to divide the model in its own way."""
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "ACCELERATE_USE_MEGATRON_LM"):
        if os.environ.get(name, "false").lower() == "true":
            raise ConfigError(
                f"{name} is set, and the model is divided by smp.DistributedModel: start the script with torchrun, or "
                "with an accelerate configuration that has neither DeepSpeed, FSDP nor Megatron-LM"
            )
