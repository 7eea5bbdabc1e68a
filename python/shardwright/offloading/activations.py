"""The offloaded activations of a rank."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardwright import _core
from shardwright.job.wrapped import WrappedModels
from shardwright.offloading.device import DeviceTransfers
from shardwright.offloading.streams import CudaStreams
from shardwright.offloading.tensors import Kept
from shardwright.scheduling import Scheduling

if TYPE_CHECKING:
    from torch import nn

    from shardwright.job.runtime import Runtime

#: How much may be on its way out at once, still in memory. A forward waits where the disk is slower than it.
MOST_OUTGOING_BYTES = 4 << 20


class OffloadedActivations:
    """Tells the core which tasks run and which calls are checkpointed; the core decides what is where, and moves it."""

    def __init__(self, runtime: Runtime) -> None:
        """Make the storage that the configuration asks for.

        Raises:
            OffloadError: There is no directory for the file.
        """
        cfg = runtime.place.cfg
        self._runtime = runtime
        self._names: Any = weakref.WeakKeyDictionary()
        directory = find_offload_directory(cfg) if cfg.offload_activations == "disk" else None
        self._core = _core.Offload(
            rank=runtime.place.rank,
            horizon=cfg.activation_loading_horizon,
            directory=directory,
            most_outgoing=MOST_OUTGOING_BYTES,
            timeout_seconds=cfg.stall_timeout_seconds,
        )
        self._transfers = DeviceTransfers(self._core, CudaStreams())
        if self._core.stays_in_memory() and runtime.place.device.type == "cpu":
            where = "a pool of the same memory" if directory is None else f"{directory}, which is in memory too"
            advice = 'set "offload_activations" to "disk"' if directory is None else "set it to a directory on a disk"
            runtime.logger.warning(
                "rank %d computes in host memory and offloads activations to %s, which saves nothing: %s",
                runtime.place.rank,
                where,
                advice if directory is None else f'for "offload_directory": {advice}',
            )

    def begin_step(self, *, one_at_a_time: bool) -> None:
        """Begin a step.

        Args:
            one_at_a_time: Whether microbatches run one after another, whatever the schedule.
        """
        place = self._runtime.place
        self._core.begin_step(
            step=self._runtime.step.number,
            schedule=self._runtime[Scheduling].text,
            ranks=place.pp_size,
            pp_rank=place.pp_rank,
            microbatches=self._runtime.step.num_microbatches,
            one_at_a_time=one_at_a_time,
        )
        self._transfers.settle()

    def begins(self, phase: str, microbatch: int) -> None:
        """See the rank begin a task of a microbatch, or go on with it."""
        self._core.begin_task(microbatch, backward=phase == "backward")
        self._transfers.settle()

    def placed(self) -> None:
        """Nothing changes when a model has been divided."""

    def begin_call(self, module: nn.Module, microbatch: int) -> Kept:
        """Return what keeps the tensors of a checkpointed call that begins.

        Args:
            module: The module that is called, or the first of several.
            microbatch: The microbatch.
        """
        return Kept(self._core.add_call(microbatch, self._name_of(module)), self._transfers)

    def counts(self) -> Mapping[str, int]:
        """Return what has been moved since the start, and how much is out."""
        return self._core.counts()

    def keep_trace(self, on: bool) -> None:
        """Keep records for a timeline from now on, or keep none."""
        self._core.keep_trace(on)

    def take_trace(self) -> _core.Timeline:
        """Return the records since the last call."""
        return self._core.take_trace()

    def close(self) -> None:
        """End the thread that moves tensors."""
        self._transfers.close()
        self._core.close()

    def _name_of(self, module: nn.Module) -> str:
        name: str | None = self._names.get(module)
        if name is None:
            kind = f"a {type(module).__name__}"
            models = self._runtime[WrappedModels].alive
            found = (name for model in models for name, part in model.module.named_modules() if part is module and name)
            own = next(found, None)
            name = self._names[module] = f"module {own!r} ({kind})" if own is not None else kind
        return name


def find_offload_directory(cfg: Any) -> str:
    """Return the directory for files of what is offloaded to disk."""
    directory: str | None = cfg.offload_directory
    return os.path.abspath(tempfile.gettempdir() if directory is None else directory)
