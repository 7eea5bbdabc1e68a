"""Files of all ranks, put together on rank 0."""

from __future__ import annotations

import contextlib
from pathlib import Path

from shardwright import _core
from shardwright.errors import ShardwrightError
from shardwright.job.objects import receive_on, send_on
from shardwright.job.runtime import Runtime

_CHANNEL = "profile"
#: What crosses at once: rank 0 asks for one after another, so that no more is in memory.
_CHUNK_BYTES = 4 << 20
#: What rank 0 says to another rank.
_MORE, _END = "more", "end"


def collect(runtime: Runtime, part: Path, whole: Path, origin_ns: int) -> None:
    """Bring the parts of all ranks to rank 0, which writes the whole trace; all ranks return together, or raise.

    Args:
        runtime: The rank.
        part: The file of this rank.
        whole: The file that rank 0 writes.
        origin_ns: Where the clock of the whole trace begins.
    """
    if runtime.place.rank > 0:
        _hand_over(runtime, part)
        return
    others, failure = range(1, runtime.place.launch.world_size), ""
    parts = [part, *(part.with_name(f"part_{rank}.json") for rank in others)]
    try:
        for rank in others:
            _receive(runtime, rank, parts[rank])
        _core.join_profile(parts, whole, origin_ns=origin_ns)
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"
        raise
    finally:
        for each in parts:
            each.unlink(missing_ok=True)
        for rank in others:
            with contextlib.suppress(ShardwrightError) if failure else contextlib.nullcontext():
                send_on(runtime, rank, _CHANNEL, (_END, failure))


def _receive(runtime: Runtime, rank: int, part: Path) -> None:
    with part.open("wb") as file:
        while True:
            send_on(runtime, rank, _CHANNEL, (_MORE, ""))
            chunk, problem = receive_on(runtime, rank, _CHANNEL)
            if problem:
                raise ShardwrightError(f"smp.profile: rank {rank} could not send its trace: {problem}")
            if not chunk:
                return
            file.write(chunk)


def _hand_over(runtime: Runtime, part: Path) -> None:
    """Send this rank's part, as rank 0 asks for it."""
    failed: OSError | None = None
    with part.open("rb") as file:
        while True:
            word, failure = receive_on(runtime, 0, _CHANNEL)
            if word == _END:
                break
            chunk, problem = b"", ""
            try:
                chunk = file.read(_CHUNK_BYTES)
            except OSError as error:
                failed, problem = error, f"{type(error).__name__}: {error}"
            send_on(runtime, 0, _CHANNEL, (chunk, problem))
    part.unlink()
    if failed is not None:
        raise failed
    if failure:
        raise ShardwrightError(f"smp.profile: rank 0 could not put the traces of all ranks together: {failure}")
