"""How this process was started, and as which rank: by a launcher's variables, or by torch's own process group.

Where a script has made a process group with torch before ``smp.init``, all ranks of the group tell one another in its
store what they know, so that they decide alike (``crates/core``, ``launch``).
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import uuid
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store

from shardwright import _core
from shardwright.errors import ConfigError, JobStartError

#: Names the process that started this one and ends it in the end, in the environment of ranks that this library starts.
LAUNCHER = "SHARDWRIGHT_LAUNCHER"
#: By process, since forks have no threads: the launcher that a thread waits for.
_ends_with: dict[int, str] = {}
#: Counts the starts beside a group, which are the same on every rank of it.
_starts = itertools.count()


def end_with_launcher(environ: Mapping[str, str]) -> None:
    """Let this process end as soon as the launcher does that started it, though that one was killed and ends nobody.

    Raises:
        JobStartError: The launcher has ended, or the environment does not name a process.
    """
    given = environ.get(LAUNCHER)
    if not given or _ends_with.get(os.getpid()) == given:
        return
    try:
        _core.end_with(int(given))
    except (ValueError, OverflowError):
        raise JobStartError(
            f"{LAUNCHER} is {given!r}; allowed: the number of a process, as shardwright run sets it"
        ) from None
    except OSError as error:
        raise JobStartError(f"the launcher of this rank, process {given}, has ended: {error}") from None
    _ends_with[os.getpid()] = given


def find_launch(environ: Mapping[str, str], timeout: float) -> tuple[_core.LaunchInfo, Store | None]:
    """Return this process's place, and the store of the process group if only that knew it.

    Args:
        environ: The environment variables.
        timeout: How many seconds to wait for the other ranks of the group.

    Raises:
        JobStartError: A launcher's variables contradict each other or the group, on any rank of it; on all its ranks.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_backend() == "fake":
        return _core.LaunchInfo.detect(environ), None
    rank, size = dist.get_rank(), dist.get_world_size()
    store = _get_default_store()
    if size == 1 or store is None:
        found = _core.LaunchInfo.beside_group(environ, rank, size)
        if found is None and size > 1:
            raise JobStartError(
                f"the process group that the script made, of {size} ranks, has no store by which they could meet: give "
                "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT to each"
            )
        return found or _core.LaunchInfo.of_group(rank, [_host()], "", 0, "alone"), None
    store = PrefixStore(f"shardwright/launch/{next(_starts)}", store)
    found, trouble = None, None
    try:
        found = _core.LaunchInfo.beside_group(environ, rank, size)
    except JobStartError as error:
        trouble = f"rank {rank} of the process group: {error}"
    own = {
        "host": _host(),
        "known": found is not None,
        "trouble": trouble,
        "place": _place(store),
        "job": uuid.uuid4().hex,
    }
    told = _exchange(store, rank, size, own, timeout)
    for each in told:
        if each["trouble"] is not None:
            raise JobStartError(each["trouble"])
    if found is not None and all(each["known"] for each in told):
        return found, None
    host, port = told[0]["place"]
    return _core.LaunchInfo.of_group(rank, [each["host"] for each in told], host, port, told[0]["job"]), store


def _exchange(store: Store, rank: int, size: int, own: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
    """Tell the other ranks of the group, and return what each has told."""
    store.set(str(rank), json.dumps(own))
    names = [str(each) for each in range(size)]
    try:
        store.wait(names, timedelta(seconds=timeout))
    except RuntimeError:
        missing = [name for name in names if not store.check([name])]
        raise JobStartError(
            f"rank {rank} waited {timeout:.0f} s for ranks {', '.join(missing)} of the process group that the script "
            "made, which did not call smp.init"
        ) from None
    return [json.loads(store.get(name)) for name in names]


def _host() -> str:
    """Return a text that is equal for processes that reach one another on their loopback interface."""
    network = os.stat("/proc/self/ns/net").st_ino
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{network}"


def _place(store: Store) -> tuple[str, int]:
    """Return where rank 0 can be reached: where it serves the group's store, or else the name of this host."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else (socket.gethostname(), 1)


def check_group(launch: _core.LaunchInfo) -> None:
    """Raise if a process group that the script made after ``smp.init`` has other ranks than the job.

    Raises:
        ConfigError: It has; gradients would be averaged over the ranks of the job only.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_backend() == "fake":
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    if size > 1 and (rank, size) != (launch.rank, launch.world_size):
        raise ConfigError(
            f"this process is rank {launch.rank} of {launch.world_size} of the job, and rank {rank} of {size} of the "
            "process group that the script made with torch.distributed.init_process_group after smp.init: call that "
            "before smp.init, which then takes part as the same rank, or start the script with a launcher"
        )
