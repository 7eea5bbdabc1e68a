"""``smp.init`` and ``smp.shutdown``: from a launched process to a rank of a running job, and back."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from shardwright import _core, guards, interrupts, logs, rendezvous, unused
from shardwright.caches import CacheTable
from shardwright.checkpoints.pretrained import Folders
from shardwright.communication import comm_options
from shardwright.config import check_world, load_config, log_lowered
from shardwright.data_parallel.collectives import ReplicaCollectives
from shardwright.data_parallel.shards import ParameterShards
from shardwright.data_parallel.weights import StepWeights
from shardwright.errors import ConfigError, ShardwrightError
from shardwright.execution import process
from shardwright.execution.call import CallWatch
from shardwright.execution.frame_table import FrameTable
from shardwright.execution.results import sites_of
from shardwright.execution.state_order import StateOrder
from shardwright.execution.task import running_task
from shardwright.execution.turn import Turn
from shardwright.execution.worker import WorkerPool
from shardwright.exit_handlers import ExitHandlers
from shardwright.frames import Leaves
from shardwright.generation import generate
from shardwright.half_precision import LossScaling
from shardwright.job.exchange import Gathers
from shardwright.job.explained import ErrorExplainer
from shardwright.job.place import Place
from shardwright.job.queued import QueuedCollectives
from shardwright.job.runtime import Runtime, find_runtime, set_default_runtime
from shardwright.job.waiting import Wait
from shardwright.job.wrapped import WrappedModels
from shardwright.launch import end_with_launcher, find_launch
from shardwright.launcher import how_to_start
from shardwright.memory import Announcement, MemoryAccount, OutOfMemory, give_back_large
from shardwright.model.methods import MethodsOutside
from shardwright.model.models import Models
from shardwright.model.pretrained import PretrainedFolders
from shardwright.model.updates import Updates
from shardwright.offloading import OffloadedActivations
from shardwright.optimizer.offloading import storage_for
from shardwright.process_groups import leave_process_groups, make_process_groups, take_device
from shardwright.progress import DELAY_SECONDS, Progress
from shardwright.scheduling import Scheduling
from shardwright.sharded_data_parallel.parameters import ShardedParameters
from shardwright.speed import SpeedAnnouncement
from shardwright.stalls.reporter import StallReporter
from shardwright.tensor_parallel.replaced import ReplacedParameters
from shardwright.timeline import TraceSources

_TRACE_CAPACITY = 1 << 16
#: How often a rank that is about to leave checks whether others still need it.
_POLL_SECONDS = 0.01


def init(config: Mapping[str, Any] | None = None, **keys: Any) -> None:
    """Initialize the library: make this process a rank of the job. Call this before any other function.

    Detects the launcher (torchrun, Open MPI's mpirun, srun, or none), connects the ranks, and compares their versions
    and configurations. Calling it again with the same configuration has no effect.

    Args:
        config: Configuration keys and values. The environment variable ``SM_HP_MP_PARAMETERS`` takes precedence.
        **keys: Further configuration keys as keyword arguments.

    Raises:
        ConfigError: A key is unknown, or its value is not allowed.
        JobStartError: The ranks could not find or authenticate each other, or their versions or configurations differ.
        ShardwrightError: It was called before with a different configuration, or in the parent of this forked process.
    """
    start_in(config, keys, os.environ)


def start_in(config: Mapping[str, Any] | None, keys: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Do what :func:`init` does in an environment; not for scripts."""
    if (running := find_runtime()) is not None:
        _check_same_start(running, load_config(config, keys, environ, running.place.launch.world_size))
        return
    end_with_launcher(environ)
    launch, met = find_launch(environ, load_config(config, keys, environ).connect_timeout_seconds)
    cfg = load_config(config, keys, environ, launch.world_size)
    if cfg.elastic_degrees is not None and launch.rank == 0:
        log_lowered(cfg, load_config(config, keys, environ), launch.world_size)
    options = comm_options(cfg, environ, launch.local_size, one_host=launch.single_host)
    try:
        check_world(cfg, launch.world_size, config, keys, environ)
    except ConfigError as error:
        fitting = _ranks_of_replica(cfg)
        if launch.launcher == "single":
            raise ConfigError(f"{error}; {how_to_start(fitting)}") from None
        raise ConfigError(f"{error}; start {fitting} ranks, or a multiple of {fitting}") from None
    topology = _core.Topology(
        launch.world_size, cfg.pipeline_parallel_degree, cfg.tensor_parallel_degree, cfg.placement_strategy
    )
    store = None
    if launch.world_size > 1:
        take_device(launch)
    progress = Progress(launch.rank)
    if launch.world_size > 1:
        with progress.phase("meeting the other ranks"):
            node, store = rendezvous.join(launch, cfg, options, met)
    else:
        node = _core.Node.single()
    try:
        runtime = _take_part(launch, cfg, topology, node)
    except BaseException:
        node.close()
        raise
    try:
        if cfg.ddp and store is not None:
            with progress.phase("making process groups with the other ranks"):
                make_process_groups(runtime, store)
        _install(runtime)
    except BaseException:
        _leave(runtime)
        raise
    set_default_runtime(runtime)
    atexit.register(_end)


def _ranks_of_replica(cfg: _core.Config) -> int:
    """Return the fewest ranks that the configuration fits."""
    return int(cfg.pipeline_parallel_degree * cfg.tensor_parallel_degree * cfg.sharded_data_parallel_degree)


def _take_part(launch: _core.LaunchInfo, cfg: Any, topology: Any, node: Any) -> Runtime:
    server = _core.Server.attach(
        node,
        rank=launch.rank,
        host=socket.gethostname(),
        pp_ranks=topology.group("PP_GROUP", launch.rank),
        tp_ranks=topology.group("TP_GROUP", launch.rank),
        stall_report_seconds=cfg.stall_report_seconds,
        stall_timeout_seconds=cfg.stall_timeout_seconds,
        trace_capacity=_TRACE_CAPACITY,
    )
    runtime = Runtime(Place(cfg, topology, launch), node, server)
    runtime.place.make_device_current()
    add_parts(runtime)
    return runtime


def add_parts(runtime: Runtime) -> None:
    """Add what the layers keep for a rank, the lowest first."""
    place = runtime.place
    runtime.add(_core.AloneRecorder())
    runtime.add(TraceSources())
    runtime.add(Gathers())
    runtime.add(Scheduling(place.cfg, place.pp_rank, place.pp_size))
    runtime.add(StepWeights(place.rank, place.cfg.microbatches))
    runtime.add(QueuedCollectives(runtime))
    runtime.add(ReplicaCollectives())
    runtime.add(LossScaling())
    runtime.add(ParameterShards())
    runtime.add(ShardedParameters(runtime))
    runtime.add(ReplacedParameters())
    runtime.add(Leaves())
    runtime.installed.callback(runtime.add(Turn()).attributes.close)
    if place.cfg.offload_activations:
        offloaded = runtime.add(OffloadedActivations(runtime))
        runtime[TraceSources].all.append(offloaded)
        runtime[Turn].observers.append(offloaded)
        runtime.installed.callback(offloaded.close)
    runtime.add(FrameTable())
    runtime.add(CacheTable(place.rank))
    runtime.add(sites_of(place.cfg))
    runtime.add(StateOrder())
    runtime.add(CallWatch())
    runtime.add(WorkerPool(runtime))
    runtime.add(runtime.add(Models(place.rank)), WrappedModels)
    runtime.add(Updates(runtime))
    runtime.add(MethodsOutside({"generate": generate}))
    if (storage := storage_for(runtime)) is not None:
        runtime.add(storage)
    runtime.add(MemoryAccount(runtime))
    runtime.add(Announcement(runtime))
    runtime.add(SpeedAnnouncement(runtime))
    runtime.add(OutOfMemory(runtime), ErrorExplainer)
    runtime.add(Folders(runtime), PretrainedFolders)


def _install(runtime: Runtime) -> None:
    """Put in place what the process has while it is a rank; :func:`_leave` takes away what is there."""
    process.end_forks_at_once()
    installed = runtime.installed
    installed.enter_context(
        guards.installed(
            num_ranks=runtime.place.launch.world_size,
            pipelined=runtime.place.pp_size > 1,
            divided=(
                runtime.place.pp_size * len(runtime.place.tp_ranks) > 1
                or runtime.place.shards_optimizer_state
                or runtime.place.shards_parameters
            ),
            scaled=runtime.place.cfg.fp16,
        )
    )
    installed.enter_context(unused.noticed(runtime))
    if runtime.place.launch.world_size > 1:
        process.keep_device_guard()  # in a notebook of one rank it would keep forks from computing gradients
        if _saves_memory(runtime.place):
            give_back_large(runtime.place.device, os.environ)
        stall_reporter = StallReporter(runtime)
        stall_reporter.start()  # where no thread can be started, there is none to stop
        runtime.observer = stall_reporter
        installed.callback(ExitHandlers(runtime).restore)
        interrupts.install(runtime[Updates].interrupted)


def _saves_memory(place: Place) -> bool:
    """Return whether the configuration gives time for memory."""
    cfg = place.cfg
    return bool(
        place.shards_optimizer_state
        or place.shards_parameters
        or cfg.offload_activations
        or cfg.offload_optimizer
        or cfg.memory_limit_bytes is not None
    )


def _check_same_start(running: Runtime, cfg: _core.Config) -> None:
    """Raise if a second ``smp.init`` asks for something else than what runs."""
    if os.getpid() != running.pid:
        raise ShardwrightError(
            f"smp.init was already called in process {running.pid}, of which this one is a fork: it is not a rank of "
            "the job"
        )
    before, after = running.place.cfg.to_dict(), cfg.to_dict()
    differing = [f"{key} is {after[key]!r} and was {before[key]!r}" for key in after if after[key] != before[key]]
    if differing:
        raise ShardwrightError(
            f"smp.init was already called with a different configuration: {', '.join(differing)}; call "
            "smp.shutdown() on every rank first"
        )


def is_initialized() -> bool:
    """Return whether ``smp.init`` has been called, and ``smp.shutdown`` has not."""
    return find_runtime() is not None


def shutdown() -> None:
    """Leave the job. Also called when the script ends; further calls have no effect.

    The root of a pipeline waits until the other ranks have read or dropped the results of the last steps, or have left
    the job.

    Raises:
        ShardwrightError: A step is running on this rank, for example when a signal handler calls this.
    """
    runtime = find_runtime()
    if runtime is not None and os.getpid() == runtime.pid and (runtime.step.running or running_task() is not None):
        raise ShardwrightError(
            f"smp.shutdown was called on rank {runtime.place.rank} inside step {runtime.step.number}, whose other "
            "ranks and worker threads still need this one; call it after the step, and end a step early by raising an "
            "error in it"
        )
    _end()


def _end() -> None:
    """What :func:`shutdown` does; when the script ends, also under a step of a thread that is left behind."""
    runtime = find_runtime()
    if runtime is None or os.getpid() != runtime.pid:
        return
    atexit.unregister(_end)
    try:
        _await_readers(runtime)
    finally:
        set_default_runtime(None)
        _leave(runtime)


def _await_readers(runtime: Runtime) -> None:
    """Keep what other ranks may still read, unless an error ends this rank's script, or nobody can go on without it."""

    def is_kept() -> bool:
        return runtime.script_error is None and runtime.node.stats()["objects_kept_for_others"] > 0

    if not is_kept():
        return
    readers, began, said = runtime.place.pp_ranks[1:], time.monotonic(), False
    what = f"ranks {readers}, which may still read what the last steps returned"
    with contextlib.suppress(ShardwrightError), Wait(runtime, what, readers, ends_by_message=True) as wait:
        while is_kept():
            wait.check()
            time.sleep(_POLL_SECONDS)
            if not said and time.monotonic() > began + DELAY_SECONDS:
                said = True
                logs.logger.warning("rank %d has finished and waits for %s", runtime.place.rank, what)


def _leave(runtime: Runtime) -> None:
    """Give back whatever of the rank's part is there, after a job or a start that failed."""
    if runtime.observer is not None:
        runtime.observer.stop()
    if runtime.step.number:
        total, _ = runtime.usage()
        logs.logger.info("rank %d: %s", runtime.place.rank, total)
    interrupts.uninstall()
    runtime.server.close()
    runtime[WorkerPool].join(5.0)
    runtime.installed.close()
    runtime.node.close(runtime.script_error)
    logs.forward()
    leave_process_groups(runtime)
