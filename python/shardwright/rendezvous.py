"""Rendezvous of the ranks, and the secret that authenticates them.

On one host the core has them meet under a name, and rank 0 makes up a secret that lies in no store. Over several hosts
they learn rank 0's address from a store of ``torch.distributed``, which anybody may read, and the secret has to be
given.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import socket
import stat
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shardwright import _core, logs
from shardwright.errors import JobStartError

LOOPBACK = "127.0.0.1"
_STORE_PREFIX = "shardwright"
_POLL_SECONDS = 0.05
_MOST_SECRET_BYTES = 1 << 16
#: Counts the starts, which are the same on every rank, so that a second job finds nothing of the first.
_starts = itertools.count()
#: Kept from one start to the next: a rank that is there first must not meet a store that is about to go.
_stores: dict[tuple[int, str, int], Store] = {}


def join(
    launch: _core.LaunchInfo, cfg: Any, options: _core.CommOptions, given: Store | None = None
) -> tuple[_core.Node, Store | None]:
    """Meet the other ranks and connect with them, over several hosts by a store that is given or at the rendezvous.

    Returns the connection, and a store for process groups of ``torch.distributed``; on one host None without ``ddp``.

    Raises:
        JobStartError: The ranks could not find, trust or agree with each other.
    """
    secret = given_secret(launch, cfg)
    if launch.single_host:
        return _join_on_this_host(launch, cfg, options, secret)
    if secret is None and launch.rank == 0:
        logs.logger.warning(
            "the job has no secret: any process that reaches its ports can join; set SHARDWRIGHT_SECRET, or the "
            "configuration key secret_file, on every rank"
        )
    if given is None:
        store = _open_store(launch, cfg)
    else:
        store = PrefixStore(f"{_STORE_PREFIX}/{launch.job_id}/{next(_starts)}", given)
    bind = cfg.bind_interface_address or _own_address(launch)
    began = time.monotonic()
    if launch.rank == 0:
        place = _core.Rendezvous.listen(bind, secret)
        meeting = f"{bind}:{place.port}/{uuid.uuid4().hex}"
        store.set("address", meeting)
    else:
        meeting = _where_rank_0_listens(launch, store, began + cfg.connect_timeout_seconds)
        host, _, port = meeting.partition("/")[0].rpartition(":")
        place = _core.Rendezvous.at(host, int(port), secret)
    return _connect(launch, cfg, options, place, bind), PrefixStore(meeting, store)


def _where_rank_0_listens(launch: _core.LaunchInfo, store: Store, deadline: float) -> str:
    """Return what rank 0 has written into the store, and not the rank 0 of a job before a restart, which is gone."""
    began = time.monotonic()
    while True:
        try:
            store.wait(["address"], timedelta(seconds=max(deadline - time.monotonic(), _POLL_SECONDS)))
            meeting = store.get("address").decode()
            host, _, port = meeting.partition("/")[0].rpartition(":")
            with socket.create_connection((host, int(port)), timeout=max(deadline - time.monotonic(), _POLL_SECONDS)):
                return meeting
        except (RuntimeError, OSError) as error:  # the store's waits end with a RuntimeError
            if time.monotonic() >= deadline or isinstance(error, RuntimeError):
                raise JobStartError(
                    f"rank {launch.rank} waited {time.monotonic() - began:.1f} s for rank 0, which did not start: "
                    f"{_first_line(error)}"
                ) from None
            time.sleep(_POLL_SECONDS)


def _join_on_this_host(
    launch: _core.LaunchInfo, cfg: Any, options: _core.CommOptions, given: bytes | None
) -> tuple[_core.Node, Store | None]:
    host, port = _meeting_place(launch, cfg)
    name = f"{launch.job_id} {host}:{port} {next(_starts)}"
    timeout = cfg.connect_timeout_seconds
    bind = cfg.bind_interface_address or LOOPBACK
    store = None
    if launch.rank == 0:
        if cfg.ddp:
            store = loopback_store(cfg.ddp_port or 0, timeout)
        place = _core.Rendezvous.open(name, bind, given, getattr(store, "port", 0))
    else:
        try:
            place = _core.Rendezvous.find(name, bind, given, timeout)
        except JobStartError as error:
            raise JobStartError(f"rank {launch.rank}: {error}") from None
    node = _connect(launch, cfg, options, place, bind)
    if cfg.ddp and store is None:
        try:
            store = TCPStore(LOOPBACK, place.note, is_master=False, timeout=timedelta(seconds=timeout))
        except BaseException:
            node.close()
            raise
    return node, store


def loopback_store(port: int, timeout: float) -> TCPStore:
    """Create a store on the loopback interface, at any port if 0; torch's own listens on all interfaces."""
    try:
        with socket.create_server((LOOPBACK, port), backlog=1024) as server:
            port = server.getsockname()[1]
            return _store_at(server, port, timeout)
    except OSError as error:
        raise JobStartError(f"rank 0 cannot serve a store at {LOOPBACK}:{port}: {error}") from None


def _store_at(server: socket.socket, port: int, timeout: float) -> TCPStore:
    """Create a store that serves on a listening socket."""

    serve = functools.partial(
        TCPStore,
        LOOPBACK,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=os.dup(server.fileno()),  # which the store closes
    )
    try:
        return serve()
    except NotImplementedError:  # torch 2.7's default backend takes no socket
        return serve(use_libuv=False)


def _meeting_place(launch: _core.LaunchInfo, cfg: Any) -> tuple[str, int]:
    host, port = launch.rendezvous_host, launch.rendezvous_port
    if host is None or port is None:
        raise JobStartError(
            f"rank {launch.rank} does not know where the job meets; set MASTER_ADDR and MASTER_PORT on every rank"
        )
    return host, port if cfg.ddp_port is None else cfg.ddp_port


def _open_store(launch: _core.LaunchInfo, cfg: Any) -> Store:
    host, port = _meeting_place(launch, cfg)
    hosted_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and cfg.ddp_port is None
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


def _connect(
    launch: _core.LaunchInfo,
    cfg: Any,
    options: _core.CommOptions,
    place: _core.Rendezvous,
    bind: str,
) -> _core.Node:
    buffer_bytes, ucx, lacks = _core.means(cfg, launch.world_size, launch.local_size)
    return _core.Node.connect(
        rank=launch.rank,
        world=launch.world_size,
        place=place,
        fingerprint=_lines(cfg.fingerprint()),
        version=_core.__version__,
        connect_timeout=cfg.connect_timeout_seconds,
        liveness_timeout=cfg.liveness_timeout_seconds,
        bind_address=bind,
        host_name=socket.gethostname(),
        buffer_bytes=buffer_bytes,
        options=options,
        ucx=ucx,
        lacks=lacks,
    )


def _first_line(error: Exception) -> str:
    """The error message without torch's stack."""
    return str(error).partition("\n")[0]


def _lines(fingerprint: str) -> str:
    """Format one key per line, so that an error can show the lines that differ."""
    return "\n".join(f"{key}={json.dumps(value)}" for key, value in sorted(json.loads(fingerprint).items()))


def _own_address(launch: _core.LaunchInfo) -> str:
    """The address of the interface that leads to the rendezvous host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((launch.rendezvous_host, launch.rendezvous_port or 1))
        return str(probe.getsockname()[0])


def given_secret(launch: _core.LaunchInfo, cfg: Any) -> bytes | None:
    """The job's secret as it was given, in the environment or a file that only this user can read; else None."""
    given = os.environ.get("SHARDWRIGHT_SECRET")
    if given is not None:
        return _checked(os.fsencode(given), "SHARDWRIGHT_SECRET", launch.rank)
    if cfg.secret_file is not None:
        return _checked(
            _read_secret(Path(cfg.secret_file), launch.rank), f"secret_file {cfg.secret_file!r}", launch.rank
        )
    if not launch.single_host and cfg.encrypt:
        raise JobStartError(
            "encrypt is true, but the job has no secret from which its keys could come: set SHARDWRIGHT_SECRET (or the "
            "key secret_file) on every rank"
        )
    if not launch.single_host and not cfg.allow_insecure_hosts:
        raise JobStartError(
            "the job spans several hosts but has no secret: set SHARDWRIGHT_SECRET (or the key secret_file) on every "
            "rank, or allow_insecure_hosts=True where the network is trusted"
        )
    return None


def _checked(secret: bytes, source: str, rank: int) -> bytes:
    """Return the secret, unless it could be guessed: every rank refuses it by itself, before it meets another."""
    weak = _core.weakness_of_secret(secret)
    if weak is not None:
        raise JobStartError(f"rank {rank}: {source} {weak}")
    return secret


def _without_waiting(path: str, flags: int) -> int:
    """Open a file, which may be a pipe that nobody writes."""
    return os.open(path, flags | os.O_NONBLOCK)


def _read_secret(path: Path, rank: int) -> bytes:
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise JobStartError(f"rank {rank} cannot read secret_file {str(path)!r}: it is no regular file")
            content = file.read(_MOST_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise JobStartError(f"rank {rank} cannot read secret_file {str(path)!r}: {error}") from error
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise JobStartError(f"secret_file {str(path)!r} has mode {mode:04o}; others must not read it: chmod 600")
    if found.st_uid != os.geteuid():
        raise JobStartError(
            f"secret_file {str(path)!r} belongs to user {found.st_uid}; it has to belong to user {os.geteuid()}, whose "
            "process this is"
        )
    if len(content) > _MOST_SECRET_BYTES:
        raise JobStartError(f"secret_file {str(path)!r} has more than the {_MOST_SECRET_BYTES} bytes that are allowed")
    return content
