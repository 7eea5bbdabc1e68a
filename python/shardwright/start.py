"""``smp.init`` and ``smp.shutdown``: from a launched process to a rank of a running job, and back."""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import json
import os
import secrets
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shardwright import _core, interrupts, logs
from shardwright.communication import comm_options
from shardwright.config import Config, load_config, without_effect
from shardwright.data_parallel import Collectives
from shardwright.errors import ConfigError, JobStartError, ShardwrightError
from shardwright.execution import process
from shardwright.execution.task import running_task
from shardwright.failure_text import FailureText
from shardwright.frames import guards
from shardwright.launch import LaunchInfo, detect
from shardwright.model import wrapping
from shardwright.picture import Photographer
from shardwright.progress import Progress
from shardwright.runtime import Runtime, find_runtime, set_default_runtime
from shardwright.step import guards as step_guards
from shardwright.step import loss_scaling
from shardwright.tensor_parallel.back_ends import BackEnd
from shardwright.tensor_parallel.back_ends.messages import ByMessages
from shardwright.tensor_parallel.back_ends.process_group import ByProcessGroup
from shardwright.tensor_parallel.group import TensorGroup

_STORE_PREFIX = "shardwright"
_TRACE_CAPACITY = 1 << 16
_SECRET_BYTES = 32
#: Counts the calls of ``init``, which are the same on every rank, so that a second job finds nothing of the first.
_starts = itertools.count()
#: Kept from one call of ``init`` to the next: a rank that is there first must not meet a store that is about to go.
_stores: dict[tuple[int, str, int], Store] = {}


def init(config: Mapping[str, Any] | None = None, **keys: Any) -> None:
    """Make this process a rank of the job; the first call in a script.

    Finds out how the process was launched (torchrun, Open MPI's mpirun, srun, or as one plain process), connects
    the ranks, and makes them agree on version and configuration. Called again with what comes to the same configuration
    (a notebook's cell that is run twice), it does nothing.

    Args:
        config: Configuration keys and values; the environment variable ``SM_HP_MP_PARAMETERS`` overrides it.
        **keys: The same as keyword arguments.

    Raises:
        ConfigError: A key is unknown, or its value is not allowed.
        JobStartError: The ranks could not find, trust or agree with each other.
        ShardwrightError: It was called already, with another configuration or before this process was forked.
    """
    if (running := find_runtime()) is not None:
        _check_same_start(running, load_config(config, keys, os.environ))
        return
    launch = detect(os.environ)
    cfg = load_config(config, keys, os.environ)
    if launch.rank == 0:
        for sentence in without_effect(config, keys, os.environ):
            logs.logger.warning("%s", sentence)
    options = comm_options(cfg, os.environ, launch.local_size)
    cfg.core.check_world(launch.world_size)
    topology = _core.Topology(
        launch.world_size, cfg.pipeline_parallel_degree, cfg.tensor_parallel_degree, cfg.placement_strategy
    )
    store = None
    progress = Progress(launch.rank)
    if launch.world_size > 1:
        secret = _given_secret(launch, cfg)
        with progress.phase("meeting the other ranks"):
            store = _open_store(launch, cfg)
            node = _connect(launch, cfg, options, store, secret)
    else:
        node = _core.Node.single()
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
    runtime = Runtime(cfg=cfg, topology=topology, launch=launch, node=node, server=server)
    if cfg.ddp and store is not None:
        with progress.phase("making process groups with the other ranks"):
            _make_process_groups(runtime, store)
    if runtime.pp_size > 1:
        guards.install()
        loss_scaling.install()
    step_guards.install(pipelined=runtime.pp_size > 1, divided=runtime.pp_size * len(runtime.tp_ranks) > 1)
    wrapping.install()
    process.keep_device_guard()
    process.end_forks_at_once()
    set_default_runtime(runtime)
    atexit.register(shutdown)
    if launch.world_size > 1:
        runtime.photographer = Photographer(runtime)
        runtime.photographer.start()
        _watch_the_end_of_the_script(runtime)
        interrupts.install(runtime.updates.interrupted)


def _check_same_start(running: Runtime, cfg: Config) -> None:
    """Raise if a second ``smp.init`` asks for something else than what runs."""
    if os.getpid() != running.pid:
        raise ShardwrightError(
            f"smp.init was called already, in process {running.pid}, of which this one is a fork: it is no rank of "
            "the job"
        )
    before, after = running.cfg.to_dict(), cfg.to_dict()
    differing = [f"{key} is {after[key]!r} and was {before[key]!r}" for key in after if after[key] != before[key]]
    if differing:
        raise ShardwrightError(
            f"smp.init was called already, with another configuration: {', '.join(differing)}; call "
            "smp.shutdown() first, on every rank, to start anew"
        )


def is_initialized() -> bool:
    """Whether ``smp.init`` was called."""
    return find_runtime() is not None


def shutdown() -> None:
    """Leave the job in good order; also done when the script ends. Further calls do nothing."""
    runtime = find_runtime()
    if runtime is None or os.getpid() != runtime.pid:
        return
    atexit.unregister(shutdown)
    set_default_runtime(None)
    if runtime.photographer is not None:
        runtime.photographer.stop()
    if runtime.step:
        usage, _ = runtime.usage()
        logs.logger.info("rank %d: %s", runtime.rank, usage)
    interrupts.uninstall()
    runtime.server.close()
    runtime.workers.join(5.0)
    step_guards.uninstall(pipelined=runtime.pp_size > 1, divided=runtime.pp_size * len(runtime.tp_ranks) > 1)
    wrapping.uninstall()
    if runtime.pp_size > 1:
        guards.uninstall()
        loss_scaling.uninstall()
    runtime.node.close(runtime.farewell)
    logs.forward()
    unfinished = [] if runtime.tensor_group is None else runtime.tensor_group.unfinished
    if unfinished or any(collectives.has_unfinished for collectives in runtime.all_collectives):
        works = [work for collectives in runtime.all_collectives for work in collectives.works]
        groups = [one for one in unfinished if isinstance(one, dist.ProcessGroup)]
        _keep_for_ever([*runtime.process_groups.values(), *groups], [*works, *unfinished])
    elif runtime.owns_process_group and dist.is_initialized():
        dist.destroy_process_group()
    runtime.process_groups.clear()


def _keep_for_ever(groups: Iterable[Any], works: Iterable[Any]) -> None:
    """Never destroy groups: Gloo would wait for collectives under way, half an hour for a rank that is frozen.

    Nor their works: Gloo's thread would destroy them when another rank goes, and crash if Python has just ended here.
    """
    held = [*works]
    for group in groups:
        held += [group, *(group._get_backend(device) for device in group._device_types)]
    for one in held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def _open_store(launch: LaunchInfo, cfg: Any) -> Store:
    host, port = launch.rendezvous_host, launch.rendezvous_port
    if host is None or port is None:
        raise JobStartError(
            f"rank {launch.rank} does not know where the job meets; set MASTER_ADDR and MASTER_PORT on every rank"
        )
    hosted_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and cfg.ddp_port is None
    port = port if cfg.ddp_port is None else cfg.ddp_port
    timeout = timedelta(seconds=cfg.connect_timeout_seconds)
    store = _stores.get((os.getpid(), host, port))
    if store is None:
        try:
            store = TCPStore(
                host,
                port,
                world_size=None,
                is_master=launch.rank == 0 and not hosted_by_launcher,
                timeout=timeout,
                wait_for_workers=False,
                # Where the script's own init_process_group meets at the same port, this process serves both.
                multi_tenant=True,
            )
        except (RuntimeError, ValueError) as error:
            raise JobStartError(
                f"rank {launch.rank} could not reach the job's store at {host}:{port}: {_first_line(error)}"
            ) from None
        _stores[os.getpid(), host, port] = store
    store.set_timeout(timeout)
    return PrefixStore(f"{_STORE_PREFIX}/{launch.job_id}/{next(_starts)}", store)


def _connect(launch: LaunchInfo, cfg: Any, options: _core.CommOptions, store: Store, secret: bytes | None) -> Any:
    began = time.monotonic()
    bind = cfg.bind_interface_address or ("127.0.0.1" if launch.single_host else _own_address(launch))
    listener = None
    if launch.rank == 0:
        listener = _core.Listener.bind(bind, 0)
        store.set("address", f"{bind}:{listener.port}")
        # Empty where one was given: a rank that was given none then fails the proof at once, instead of waiting.
        store.set("secret", secrets.token_hex(_SECRET_BYTES) if secret is None else "")
    try:
        address = store.get("address").decode()
        if secret is None:
            secret = bytes(store.get("secret"))
    except RuntimeError as error:
        raise JobStartError(
            f"rank {launch.rank} waited {time.monotonic() - began:.1f} s for rank 0, which did not start: "
            f"{_first_line(error)}"
        ) from None
    host, _, port = address.rpartition(":")
    return _core.Node.connect(
        rank=launch.rank,
        world=launch.world_size,
        host=host,
        port=int(port),
        secret=secret,
        fingerprint=_lines(cfg.core.fingerprint()),
        version=_core.__version__,
        connect_timeout=cfg.connect_timeout_seconds,
        liveness_timeout=cfg.liveness_timeout_seconds,
        bind_address=bind,
        host_name=socket.gethostname(),
        buffer_bytes=0 if cfg.transport == "tcp" else cfg.comm_buffer_bytes,
        listener=listener,
        options=options,
    )


def _first_line(error: Exception) -> str:
    """Without the stack of torch's own functions."""
    return str(error).partition("\n")[0]


def _lines(fingerprint: str) -> str:
    """A key to a line, so that an error can show the lines that differ."""
    return "\n".join(f"{key}={json.dumps(value)}" for key, value in sorted(json.loads(fingerprint).items()))


def _own_address(launch: LaunchInfo) -> str:
    """The address of the interface that leads to the rendezvous host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((launch.rendezvous_host, launch.rendezvous_port or 1))
        return str(probe.getsockname()[0])


def _given_secret(launch: LaunchInfo, cfg: Any) -> bytes | None:
    """The job's secret: given, or from a file that only its owner can read; else rank 0 makes one up."""
    given = os.environ.get("SHARDWRIGHT_SECRET")
    if given:
        return given.encode()
    if cfg.secret_file is not None:
        path = Path(cfg.secret_file)
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            content = path.read_bytes().strip()
        except OSError as error:
            raise JobStartError(f"rank {launch.rank} cannot read secret_file {str(path)!r}: {error}") from error
        if mode & 0o077:
            raise JobStartError(f"secret_file {str(path)!r} has mode {mode:04o}; others must not read it: chmod 600")
        if not content:
            raise JobStartError(f"secret_file {str(path)!r} is empty")
        return content
    if not launch.single_host and not cfg.allow_insecure_hosts:
        raise JobStartError(
            "the job spans several hosts but has no secret: set SHARDWRIGHT_SECRET (or the key secret_file) on every "
            "rank, or allow_insecure_hosts=True where the network is trusted"
        )
    return None


def _make_process_groups(runtime: Runtime, store: Store) -> None:
    if not dist.is_initialized():
        if runtime.cfg.ddp_dist_backend == "nccl" and not torch.cuda.is_available():
            raise ConfigError('the configuration key "ddp_dist_backend" is "nccl", but no GPU is here; allowed: "auto"')
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(
            backend, store=PrefixStore("groups", store), rank=runtime.rank, world_size=runtime.launch.world_size
        )
        runtime.owns_process_group = True
    for kind in ("WORLD", "MP_GROUP", "DP_GROUP", "PP_GROUP", "TP_GROUP", "RDP_GROUP"):
        groups = sorted({tuple(runtime.topology.group(kind, rank)) for rank in range(runtime.launch.world_size)})
        for ranks in groups:  # every rank makes every group, in one order
            group = dist.new_group(list(ranks))
            if runtime.rank in ranks:
                runtime.process_groups[kind] = group
    if len(runtime.dp_ranks) > 1:
        runtime.collectives = Collectives(runtime)
    if len(runtime.tp_ranks) > 1:
        if len(runtime.rdp_ranks) > 1:
            runtime.rdp_collectives = Collectives(runtime, "RDP_GROUP")
        group = runtime.process_groups["TP_GROUP"]
        runtime.tensor_group = TensorGroup(
            group,
            optimize=runtime.cfg.optimize,
            prescaled_batch=runtime.cfg.prescaled_batch,
            back_end=_tensor_back_end(runtime, group),
            enter=functools.partial(_enter_collective, runtime.server),
        )


def _tensor_back_end(runtime: Runtime, group: dist.ProcessGroup) -> BackEnd:
    """The library's own messages where they are fastest, between processors of one host."""
    one_host = len({runtime.node.host(rank) for rank in runtime.tp_ranks}) == 1
    if one_host and runtime.device.type == "cpu":
        return ByMessages(runtime, runtime.tp_ranks)
    return ByProcessGroup(group, functools.partial(runtime.wait_collective, ranks=runtime.tp_ranks))


def _enter_collective(server: _core.Server, name: str) -> None:
    """Tell the other ranks of TP_GROUP where the running task is, so that none waits for one that is elsewhere."""
    task = running_task()
    if task is not None:
        server.enters_collective(task.worker, name)


def _watch_the_end_of_the_script(runtime: Runtime) -> None:
    """Tell the others why this rank leaves, and end by a signal with one line instead of a traceback."""
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.stderr.write(f"shardwright: rank {runtime.rank} was interrupted\n")
            return
        runtime.farewell = FailureText.of(error)._asdict()
        previous(kind, error, trace)

    sys.excepthook = excepthook
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:

        def terminate(number: int, _frame: FrameType | None) -> None:
            sys.stderr.write(f"shardwright: rank {runtime.rank} was terminated\n")
            sys.exit(128 + number)

        signal.signal(signal.SIGTERM, terminate)
