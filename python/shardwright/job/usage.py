"""Where a rank's time went."""

from __future__ import annotations

from shardwright import _core
from shardwright.job.runtime import Runtime


def usage(runtime: Runtime) -> tuple[_core.Usage, _core.Usage]:
    """In all steps, and in the newest one."""
    if runtime.place.pp_size == 1:
        return runtime[_core.AloneRecorder].usage()
    total, newest = runtime.server.usage()
    return total, newest
