"""Process groups of ``torch.distributed``: which back end they have, how they are made, and how they are left.

Ranks tell one another which device each has, and the core decides alike on all of them (``crates/core``,
``collectives.rs``).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from shardwright import _core, logs
from shardwright.data_parallel.collectives import Collectives, ReplicaCollectives
from shardwright.errors import JobStartError
from shardwright.execution.task import running_task
from shardwright.job.objects import receive_from_others, send_on
from shardwright.job.place import Place
from shardwright.job.queued import QueuedCollectives
from shardwright.job.runtime import Runtime
from shardwright.sharded_data_parallel.groups import make_process_group, make_sharding_groups
from shardwright.tensor_parallel.back_ends import BackEnd
from shardwright.tensor_parallel.back_ends.messages import ByMessages
from shardwright.tensor_parallel.back_ends.process_group import ByProcessGroup
from shardwright.tensor_parallel.group import TensorGroup

_CHANNEL = "devices of ranks"


def make_process_groups(runtime: Runtime, store: Store) -> None:
    """Make the job's process groups, with the collectives over them. All ranks call this.

    Raises:
        ConfigError: The back end of collectives that is asked for cannot work; on all ranks, in the same words.
    """
    place = runtime.place
    if place.launch.single_host:
        # Else torch's back ends listen where other hosts can call, by the name of this one.
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, "lo")
    # By default NCCL's watchdog ends the process when another rank goes, before this library can say which one and why.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
    back_end = choose_back_end(runtime)
    if not dist.is_initialized():
        dist.init_process_group(
            back_end,
            store=PrefixStore("groups", store),
            rank=place.rank,
            world_size=place.launch.world_size,
            device_id=place.device if "nccl" in back_end else None,
        )
        runtime.owns_process_group = True
    for kind in ("WORLD", "MP_GROUP", "DP_GROUP", "PP_GROUP", "TP_GROUP", "RDP_GROUP"):
        make_process_group(runtime, kind, [place.topology.group(kind, rank) for rank in range(place.launch.world_size)])
    if len(place.dp_ranks) > 1:
        runtime[ReplicaCollectives].dp = Collectives(runtime)
    if place.shards_parameters:
        make_sharding_groups(runtime)
    if len(place.tp_ranks) > 1:
        if len(place.rdp_ranks) > 1:
            runtime[ReplicaCollectives].rdp = Collectives(runtime, "RDP_GROUP")
        group, messages = runtime.process_groups["TP_GROUP"], ByMessages(runtime, place.tp_ranks)
        runtime.add(
            TensorGroup(
                group,
                optimize=place.cfg.optimize,
                prescaled_batch=place.cfg.prescaled_batch,
                back_end=_tensor_back_end(runtime, group, messages),
                host=messages,
                enter=functools.partial(_enter_collective, runtime.server),
            )
        )


def choose_back_end(runtime: Runtime) -> str:
    """Return what ``init_process_group`` calls the back end that all ranks choose, or that of the script's group."""
    place, cfg = runtime.place, runtime.place.cfg
    own = own_facts(place)
    for rank in range(place.launch.world_size):
        if rank != place.rank:
            send_on(runtime, rank, _CHANNEL, own)
    try:
        told = receive_from_others(runtime, _CHANNEL, cfg.connect_timeout_seconds)
    except TimeoutError as error:
        raise JobStartError(str(error)) from None
    told.insert(place.rank, own)
    chosen = _core.collective_back_end(cfg.ddp_dist_backend, told)
    has_devices = any(json.loads(facts)["device"] for facts in told)
    if chosen == "gloo" and cfg.ddp_dist_backend == "auto" and has_devices and place.rank == 0:
        logs.logger.warning(
            "collectives of GPUs use Gloo, which takes them through host memory: ranks share a GPU, or torch has no "
            'NCCL. Where each rank has one of its own, call torch.cuda.set_device before smp.init; "ddp_dist_backend": '
            '"gloo" asks for this'
        )
    return chosen


def own_facts(place: Place) -> str:
    """Return what a rank tells the others about its collectives, as the core reads it.

    The UUID of a device is asked of CUDA, which this initializes; processes that are forked later, as those of data
    loaders, cannot use CUDA anyway once training has begun.
    """
    device = gpu = None
    if place.device.type == "cuda":
        properties = torch.cuda.get_device_properties(place.device)
        device = str(properties.uuid)
        address = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
        gpu = None if None in address else ":".join(f"{number:x}" for number in address)
    return json.dumps(
        {
            "host": os.uname().nodename,
            "device": device,
            "gpu": gpu,
            "has_gloo": dist.is_gloo_available(),
            "has_nccl": dist.is_nccl_available(),
            "group": dist.get_backend_config() if dist.is_initialized() else None,
        }
    )


def take_device(launch: _core.LaunchInfo) -> None:
    """Give a rank the device of its local rank, unless the script has begun to use CUDA and so has a device.

    Scripts that call ``torch.cuda.set_device(smp.local_rank())`` after ``smp.init`` ask for the same one.
    """
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if torch.cuda.is_available() and not is_used and (count := torch.cuda.device_count()) > 1:
        torch.cuda.set_device(launch.local_rank % count)


def leave_process_groups(runtime: Runtime) -> None:
    """Give back the job's process groups, and torch's default group where the job has made it."""
    runtime[QueuedCollectives].leave()
    group = runtime.find(TensorGroup)
    unfinished = [] if group is None else group.unfinished
    if unfinished or any(collectives.has_unfinished for collectives in runtime[ReplicaCollectives].all):
        works = [work for collectives in runtime[ReplicaCollectives].all for work in collectives.works if work]
        groups = [one for one in unfinished if isinstance(one, dist.ProcessGroup)]
        _never_destroy([*runtime.process_groups.values(), *groups], [*works, *unfinished])
    elif runtime.owns_process_group and dist.is_initialized():
        dist.destroy_process_group()
    elif dist.is_initialized():
        for group in runtime.process_groups.values():
            with contextlib.suppress(ValueError):  # the script has ended its own, and all others with it
                dist.destroy_process_group(group)
    runtime.process_groups.clear()


def _never_destroy(groups: Iterable[Any], works: Iterable[Any]) -> None:
    """Keep process groups alive: Gloo would wait for collectives under way, half an hour for a rank that is frozen.

    Nor their works: Gloo's thread would destroy them when another rank goes, and crash if Python has just ended here.
    """
    held = [*works]
    for group in groups:
        held += [group, *(group._get_backend(device) for device in group._device_types)]
    for one in held:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


def _tensor_back_end(runtime: Runtime, group: dist.ProcessGroup, messages: ByMessages) -> BackEnd:
    """The library's own messages where they are fastest, between processors of one host."""
    one_host = len({runtime.node.host(rank) for rank in runtime.place.tp_ranks}) == 1
    if one_host and runtime.place.device.type == "cpu":
        return messages
    return ByProcessGroup.of_rank(runtime, group)


def _enter_collective(server: _core.Server, name: str) -> None:
    """Tell the other ranks of TP_GROUP where the running task is, so that none waits for one that is elsewhere."""
    task = running_task()
    if task is not None:
        server.enters_collective(task.worker, name)
