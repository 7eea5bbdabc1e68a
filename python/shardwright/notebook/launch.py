"""Starts ranks by forking, so that what a notebook has defined is there for them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwright.errors import ConfigError, ShardwrightError
from shardwright.job.runtime import find_runtime
from shardwright.notebook.rank import Pipes, run_rank
from shardwright.notebook.watch import Watched, watch
from shardwright.rendezvous import loopback_store

T = TypeVar("T")

#: How long ranks may take to find each other at the store.
_STORE_SECONDS = 300.0


def launch(function: Callable[..., T], *args: Any, ranks: int = 2, **kwargs: Any) -> list[T]:
    """Run a function as the ranks of a job on this host, from a notebook or an interactive session.

    Each rank is a fork of this process that calls ``function(*args, **kwargs)``, which calls ``smp.init`` and trains.
    What it changes stays in the rank; only its result comes back, which has to be picklable, such as losses or a state
    dict. Lines that ranks write are shown with their rank. Each rank computes in one thread.

    Args:
        function: What each rank runs. It may use everything that the notebook has defined.
        *args: Its arguments.
        ranks: The number of ranks.
        **kwargs: Its keyword arguments.

    Returns:
        The results, by rank.

    Raises:
        ConfigError: An argument is not allowed.
        ShardwrightError: This process cannot be forked: it is a rank of a job, or uses a GPU, or called from a thread.
        RemoteError: A rank failed: the first that did, with its traceback. The other ranks have ended, too.
    """
    if not callable(function):
        raise ConfigError(f"launch was given {function!r}; allowed: a function, without calling it, then its arguments")
    if type(ranks) is not int or ranks < 1:
        raise ConfigError(f"ranks is {ranks!r}; allowed: an integer of 1 or more")
    _check_forkable()
    store = loopback_store(0, _STORE_SECONDS)
    sys.stdout.flush()
    sys.stderr.flush()
    watched: list[Watched] = []
    try:
        with _uninterrupted():
            for rank in range(ranks):
                watched.append(_start(rank, _environment(rank, ranks, store.port), lambda: function(*args, **kwargs)))
        return watch(watched)
    finally:
        for one in watched:
            one.end()


def _check_forkable() -> None:
    """Raise if ranks forked from this process could not work."""
    why = None
    if find_runtime() is not None:
        why = "smp.init was called in this process, which is a rank itself: call smp.shutdown() first"
    elif dist.is_available() and dist.is_initialized():
        why = "torch.distributed is initialized in this process: call torch.distributed.destroy_process_group() first"
    elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        why = (
            "this process uses a GPU already, which processes forked from it cannot: restart the notebook's kernel, "
            "and call launch before anything uses a GPU; create models and tensors on GPUs inside of the function"
        )
    elif threading.current_thread() is not threading.main_thread():
        why = "it was called in a thread: call it in the main thread, as cells of a notebook are run"
    if why is not None:
        raise ShardwrightError(f"shardwright.notebook.launch cannot start ranks: {why}")


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return what a launcher sets."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Keep an interrupt until the end: it may come when a rank has been forked that nobody would end."""
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _start(rank: int, environment: dict[str, str], function: Callable[[], Any]) -> Watched:
    pipes = [os.pipe() for _ in Pipes._fields]
    notebook = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a kernel has threads, which the rank does without
        pid = os.fork()
    if pid == 0:
        for reading, _ in pipes:
            os.close(reading)
        run_rank(notebook, environment, Pipes(*(writing for _, writing in pipes)), function)
    with contextlib.suppress(OSError):  # the rank does it too: whoever comes first
        os.setpgid(pid, pid)
    for _, writing in pipes:
        os.close(writing)
    return Watched(rank, pid, Pipes(*(reading for reading, _ in pipes)))
