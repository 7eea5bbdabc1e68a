"""A rank's time statistics."""

from __future__ import annotations

from shardwright import _core
from shardwright.job.runtime import Runtime


def usage(runtime: Runtime) -> tuple[_core.Usage, _core.Usage]:
    """Return the statistics of all steps, and of the last one."""
    if runtime.place.pp_size == 1:
        return runtime[_core.AloneRecorder].usage()
    total, newest = runtime.server.usage()
    return total, newest
