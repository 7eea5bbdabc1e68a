"""Where the time of a call goes: the library's own functions, timed from outside."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from shardwright.execution import call, serve
from shardwright.job.runtime import current_runtime

#: By rank, what is timed: where it is, its name, and what it is called in the table. A part comes after what it is in.
REQUESTER = (
    (call, "call_remote", "the whole call"),
    (call, "_given", "  take the arguments apart and copy them"),
    (call, "context_of", "  find torch's modes and settings"),
    ("server", "send_forward", "  send the request"),
    ("server", "wait", "  wait for the answer"),
    (call, "_receive", "  build the result"),
)
EXECUTOR = (
    (serve, "run_forward", "serve the request"),
    (serve, "_cut_arguments", "  make the arguments' tensors"),
    (serve, "build", "  put the arguments together"),
    (serve, "_execute", "  run the module"),
    (serve, "describe_results", "  look what the results are"),
    (serve, "_packed", "  copy the results"),
    ("server", "respond", "  send the answer"),
)


class _Timed:
    """An object some of whose methods are replaced."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Stages:
    """Replaces the functions by ones that take their time."""

    def __init__(self) -> None:
        """Nothing is replaced yet."""
        self._taken: dict[str, list[float]] = {}
        self._originals: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Replace them."""
        runtime = current_runtime()
        from shardwright.execution import intercept, worker

        server = _Timed(runtime.server)
        for place, name, label in (*REQUESTER, *EXECUTOR):
            if place == "server":
                setattr(server, name, self._timed(getattr(runtime.server, name), label))
                continue
            timed = self._timed(getattr(place, name), label)
            users = [place, *(user for user in (intercept, worker) if hasattr(user, name))]
            for user in users:
                self._originals.append((user, name, getattr(user, name)))
                setattr(user, name, timed)
        self._originals.append((runtime, "server", runtime.server))
        runtime.server = server

    def uninstall(self) -> None:
        """Put them back."""
        for place, name, original in reversed(self._originals):
            setattr(place, name, original)

    def medians(self) -> dict[str, float]:
        """By label, the median in microseconds; in the order of the table."""
        labels = [label for _, _, label in (*REQUESTER, *EXECUTOR)]
        return {label: statistics.median(self._taken[label]) for label in labels if self._taken.get(label)}

    def _timed(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        taken = self._taken.setdefault(label, [])
        now = time.perf_counter

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = now()
            try:
                return function(*args, **kwargs)
            finally:
                taken.append(1e6 * (now() - began))

        return timed
