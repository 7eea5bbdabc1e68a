"""The runtime of a rank: its position in the job, its resources, and its current step."""

from __future__ import annotations

import contextlib
import contextvars
import os
import socket
from typing import TYPE_CHECKING, Any, TypeVar

from shardwright import _core, logs
from shardwright.errors import ShardwrightError
from shardwright.job.place import Place
from shardwright.job.step import Step
from shardwright.progress import Progress

if TYPE_CHECKING:
    from shardwright.job.waiting import StallObserver, Wait

T = TypeVar("T")


class Runtime:
    """A rank of a job. ``smp.*`` uses the current one; a process may contain several.

    What the layers above keep for the rank is found by its type: ``runtime[Models]``.

    Attributes:
        place: What does not change.
        step: The current or last step.
        node: The connection to the other ranks.
        server: The execution server.
        progress: Says what rank 0 does where a start takes long.
        installed: Takes away what was put in place for this rank in the process: replaced functions, handlers.
        process_groups: Those of ``torch.distributed``, by the kind of group.
        owns_process_group: Whether the default group was made here.
        waits: What the main thread waits for outside the execution server, the innermost last.
        observer: Looks at long waits; None in a job of one rank.
        script_error: Why this rank leaves the job, when an exception ended its script.
    """

    logger = logs.logger

    def __init__(self, place: Place, node: Any, server: _core.Server) -> None:
        """Create the runtime; see :func:`shardwright.start.init`."""
        self.place = place
        self.step = Step(place.cfg.microbatches)
        self.node = node
        self.server = server
        self.progress = Progress(place.rank)
        self.installed = contextlib.ExitStack()
        self.process_groups: dict[str, Any] = {}
        self.owns_process_group = False
        self.waits: list[Wait] = []
        self.observer: StallObserver | None = None
        self.script_error: dict[str, str] | None = None
        self.pid = os.getpid()
        self._parts: dict[type[Any], Any] = {}

    def add(self, part: T, kind: type[Any] | None = None) -> T:
        """Register a component under its type, or under ``kind``."""
        self._parts[type(part) if kind is None else kind] = part
        return part

    def remove(self, kind: type[Any]) -> None:
        """Unregister the component of a type."""
        self._parts.pop(kind, None)

    def find(self, kind: type[T]) -> T | None:
        """Return the component of a type, or None."""
        return self._parts.get(kind)

    def __getitem__(self, kind: type[T]) -> T:
        """Return the component of a type, which must exist."""
        part: T = self._parts[kind]
        return part

    def describe(self) -> str:
        """Describe what this rank is doing, in one line. Thread-safe."""
        step = self.step
        if self.place.pp_size == 1 and step.running and not step.committing:
            place = f"rank {self.place.rank} on host {socket.gethostname()!r}"
            text = f"step {step.number}: {place}: runs microbatch {step.microbatch} in the script's thread"
        else:
            text = self.server.describe()
        return "; ".join([text, *(wait.describe() for wait in list(self.waits))])

    def usage(self) -> tuple[_core.Usage, _core.Usage]:
        """Where this rank's time went: in all steps, and in the newest one."""
        return self[_core.AloneRecorder].usage() if self.place.pp_size == 1 else self.server.usage()

    def begin_step_alone(self, name: str) -> None:
        """Begin a step of a pipeline with one rank."""
        if self.place.launch.world_size > 1:
            self.server.begin_alone(step=self.step.number, function=name)

    def check_abort(self, needed: list[int]) -> None:
        """Raise if the current (or next) step has failed, or if one of the ranks ``needed`` is gone."""
        self.server.check_abort(self.step.number if self.step.running else self.step.number + 1, needed)

    def check_process(self, what: str) -> None:
        """Raise in a forked process, which lacks the threads of the rank."""
        if (pid := os.getpid()) != self.pid:
            raise ShardwrightError(
                f"{what} was called in process {pid}, which was forked from rank {self.place.rank} (process {self.pid})"
                " and is no rank of the job: call it in the rank itself, and use forked processes, such as those of a "
                "DataLoader, for data; for a job of its own, let the process be started anew (multiprocessing's start "
                'method "spawn") and call smp.init there'
            )


_current: contextvars.ContextVar[Runtime | None] = contextvars.ContextVar("shardwright_runtime", default=None)
_default: Runtime | None = None


def current_runtime() -> Runtime:
    """Return the runtime of the calling context; raises :class:`ShardwrightError` before ``smp.init``."""
    if (runtime := find_runtime()) is None:
        raise ShardwrightError("call smp.init(...) before any other function of shardwright")
    return runtime


def find_runtime() -> Runtime | None:
    """Return the runtime of the calling context, or None before ``smp.init``."""
    return _current.get() or _default


def set_default_runtime(runtime: Runtime | None) -> None:
    """Set the runtime of the process."""
    global _default
    _default = runtime


def set_current_runtime(runtime: Runtime | None) -> contextvars.Token[Runtime | None]:
    """Set the runtime of the calling context, for several ranks in one process."""
    return _current.set(runtime)
