"""What ranks do, in few lines that begin with the line of the user's code; whole stacks go to the log's debug level."""

from __future__ import annotations

import itertools
import linecache
import logging
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from types import FrameType

import torch

from shardwright import _core
from shardwright.execution.worker import WorkerPool
from shardwright.failure_text import sendable
from shardwright.job.runtime import Runtime

#: With a line before it, a picture of all ranks has fewer than 20 lines, however many ranks there are.
MAX_LINES = 18
#: So many threads at one place are named.
_NAMED = 2
_OWN = os.path.join(os.path.dirname(_core.__file__), "")
#: Where libraries are, and code that has no file.
_LIBRARIES = (
    os.path.dirname(os.path.dirname(torch.__file__)) + os.sep,
    _OWN,
    sysconfig.get_path("stdlib") + os.sep,
    "<",
)
_RANK = re.compile(r"rank (\d+) (.*)")


def describe(runtime: Runtime, script: int) -> str:
    """Describe what a rank does: where its code is, what the core knows, and where further threads are.

    Args:
        runtime: The rank.
        script: The thread that runs its script.
    """
    frames = sys._current_frames()
    threads = []
    running = list(runtime[WorkerPool].running.items())
    for thread, task in sorted(running, key=lambda one: one[1].microbatch):
        what = "the step function" if task.module is None else f"module {task.module!r}"
        threads.append((thread, f"{what}, {task.phase}, microbatch {task.microbatch} (worker {task.worker})"))
    threads.append((script, "the script"))
    found: list[tuple[int, str, str]] = []
    for thread, name in threads:
        if (frame := frames.get(thread)) is None:
            continue
        if runtime.logger.isEnabledFor(logging.DEBUG):
            stack = "".join(traceback.format_stack(frame))
            runtime.logger.debug("rank %d: stack of %s:\n%s", runtime.place.rank, name, stack)
        own = _innermost(frame, _LIBRARIES)
        # Who is in this library waits, and may do so for who is not.
        order = 2 if own is None else int(frame.f_code.co_filename.startswith(_OWN))
        found.append((order, _line(own or _innermost(frame, (_OWN,)) or frame), name))
    frames.clear()  # this function's own is among them, and would keep all until garbage is collected
    places: dict[str, list[str]] = {}
    for _, place, name in sorted(found, key=lambda one: one[0]):
        places.setdefault(place, []).append(name)
    told = [f"{place}  [{_names(names)}]" for place, names in places.items()]
    first, *further = told or ["an unknown place"]
    lines = [
        f"rank {runtime.place.rank} at {first}",
        f"  {runtime.describe()}",
        *(f"  also at {one}" for one in further),
    ]
    return "\n".join(sendable(line.replace("\n", " ")) for line in lines)


def script_place(script: int) -> str:
    """Return where a thread is: the innermost line that is not of a library."""
    frame = sys._current_frames().get(script)
    own = None if frame is None else _innermost(frame, _LIBRARIES)
    return "at an unknown place" if own is None else sendable(f"at {_place(own)}")


def picture(texts: Iterable[str]) -> str:
    """Return what all ranks do in at most :data:`MAX_LINES` lines.

    Many ranks are grouped by where they are, the smallest groups first, since one that is elsewhere is what the others
    may wait for.

    Args:
        texts: The ranks' descriptions, which begin with ``rank``, its number and where it is; further lines are
            indented.
    """
    blocks = [text.split("\n") for text in texts]
    if 2 * len(blocks) > MAX_LINES:
        blocks = _grouped(blocks)
    if len(blocks) > MAX_LINES:
        left_out = len(blocks) - MAX_LINES + 1
        blocks = [*blocks[: MAX_LINES - 1], [f"and {left_out} more places"]]
    each = MAX_LINES // max(len(blocks), 1)
    return "\n".join(line for block in blocks for line in block[:each])


def split_ranks(text: str) -> list[str]:
    """Return the descriptions that were joined to one text."""
    return re.split(r"\n(?! )", text)


def _grouped(blocks: Sequence[Sequence[str]]) -> list[list[str]]:
    """Make one block of all ranks that are at the same place, with the further lines of the first of them."""
    groups: dict[str, list[int]] = {}
    further: dict[str, Sequence[str]] = {}
    for first, *rest in blocks:
        found = _RANK.fullmatch(first)
        assert found is not None, first
        groups.setdefault(found[2], []).append(int(found[1]))
        further.setdefault(found[2], rest)
    ordered = sorted(groups.items(), key=lambda group: (len(group[1]), group[1]))
    return [[f"{_ranks(ranks)} {text}", *further[text]] for text, ranks in ordered]


def _ranks(numbers: Sequence[int]) -> str:
    """Return ``rank 3``, or ``ranks 0-2, 5``."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    runs = []
    for _, run in itertools.groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return f"ranks {', '.join(runs)}"


def _names(names: Sequence[str]) -> str:
    """List the first threads at a place, and count the others."""
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return "; ".join([*names[:_NAMED], *more])


def _innermost(frame: FrameType, without: tuple[str, ...]) -> FrameType | None:
    """Return the innermost frame whose file is in none of these folders."""
    found: FrameType | None = frame
    while found is not None and found.f_code.co_filename.startswith(without):
        found = found.f_back
    return found


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"


def _line(frame: FrameType) -> str:
    """Return the place of a frame, with its line of code."""
    code = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals).strip()
    return f"{_place(frame)}: {code}" if code else _place(frame)
