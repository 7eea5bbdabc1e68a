"""Saves that end midway: ranks that are killed, and disks that are full."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from shardwright.errors import ShardwrightError

from tests.torn.ranks import REFUSED, Ranks
from tests.torn.states import commit, found, write


def same_tag(_: int) -> str:
    """Every save replaces the one before."""
    return "latest"


def own_tag(step: int) -> str:
    """Every save has a folder of its own, and older ones go."""
    return f"step{step}"


def first_save(folder: Path) -> None:
    """A complete checkpoint of step 0, which is there before anything ends midway."""
    commit(folder, own_tag(0), 0, [write(folder, own_tag(0), rank, 0) for rank in range(2)])


def judged(folder: Path, least: int, most: int) -> tuple[int, str]:
    """The step of the newest checkpoint, and what is wrong with it; older than ``least`` would be lost work."""
    try:
        newest = found(folder)
    except ShardwrightError as error:
        return least, str(error)
    if not newest.problem and not least <= newest.step <= most:
        return newest.step, f"it is of step {newest.step}, and step {least} was complete"
    return newest.step, newest.problem


def kills(folder: Path, count: int, seed: str, problems: list[str]) -> Counter[str]:
    """End one rank or both, so many times, at random moments of a save; what the newest checkpoint then was.

    Every round goes on in what the one before left. ``problems`` takes what was torn.
    """
    first_save(folder)
    outcomes: Counter[str] = Counter()
    step, seconds = 0, {"begun": 0.05, "written": 0.02}
    for number in range(count):
        chance = random.Random(f"{seed}/kill/{number}")
        tag = chance.choice((same_tag, own_tag))
        ranks = Ranks(folder, step + 1, tag=tag, background=chance.random() < 0.3)
        last = step + 1 + chance.choice((0, 0, 1, 2))
        # Completing takes less time than writing, and has more steps that an end may come between.
        since = chance.choice(("begun", "written"))
        ranks.wait_until(since, step + 1)
        begun = time.monotonic()
        if last > step + 1:
            ranks.wait_until("complete", step + 1)
            seconds[since] = time.monotonic() - begun
            ranks.wait_until(since, last)
        time.sleep(chance.uniform(0.0, 1.1 * seconds[since]))
        ended = chance.choice(([0], [1], [0, 1]))
        ranks.kill(ended)
        ranks.ended()
        told = ranks.told
        newest, problem = judged(folder, max(step, told.complete), told.begun)
        if problem:
            problems.append(f"kill {number} of seed {seed} (ranks {ended}, {tag.__name__}): {problem}")
        left = any(name.endswith(".writing") for name in os.listdir(folder))
        kind = "the new state" if newest == told.begun else "the old state"
        outcomes[f"{kind}, {'with' if left else 'without'} an unfinished folder"] += 1
        step = newest
    return outcomes


def full_disks(folder: Path, count: int, seed: str, problems: list[str]) -> Counter[str]:
    """Let saves meet the end of a disk: a limit on files' sizes, and a small file system where one can be mounted."""
    outcomes: Counter[str] = Counter()
    limited = folder / "limited"
    first_save(limited)
    part = max(path.stat().st_size for path in (limited / "step0_partial").iterdir())

    def limit(chance: random.Random) -> Callable[[int], None]:
        concerned, size = chance.choice((0, 1)), int(part * chance.uniform(0.0, 1.1) ** 2)

        def before(rank: int) -> None:
            if rank == concerned:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

        return before

    step = 0
    for number in range(count):
        chance = random.Random(f"{seed}/limit/{number}")
        step = _attempt(limited, step, chance, limit(chance), f"limit {number} of seed {seed}", outcomes, problems)
    with _small_disk(folder / "small", 8 * part) as small:
        if small is None:
            outcomes["no small file system can be mounted here"] += 1
            return outcomes
        first_save(small)
        step, ballast = 0, small / ".ballast"
        for number in range(count):
            chance = random.Random(f"{seed}/disk/{number}")
            room = os.statvfs(small)
            free = room.f_bavail * room.f_frsize
            taken = free - int(2.2 * part * chance.uniform(0.0, 1.0))
            with ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(taken, 1))
            name = f"disk {number} of seed {seed}"
            step = _attempt(small, step, chance, lambda _: None, name, outcomes, problems)
            ballast.unlink()
    return outcomes


def _attempt(
    folder: Path,
    step: int,
    chance: random.Random,
    before: Callable[[int], None],
    name: str,
    outcomes: Counter[str],
    problems: list[str],
) -> int:
    """One save that may fail by an error; the step that is the newest then."""
    ranks = Ranks(
        folder,
        step + 1,
        steps=1,
        tag=chance.choice((same_tag, own_tag)),
        background=chance.random() < 0.3,
        before=before,
    )
    codes = ranks.ended()
    told = ranks.told
    if not set(codes) <= {0, REFUSED}:
        problems.append(f"{name}: the ranks ended with {codes}")
    if told.complete < step + 1 and REFUSED not in codes:
        problems.append(f"{name}: the save failed without an error")
    newest, problem = judged(folder, max(step, told.complete), told.begun)
    if problem:
        problems.append(f"{name}: {problem}")
    kind = "refused" if REFUSED in codes else "saved"
    outcomes[f"{kind}, {'the new' if newest == step + 1 else 'the old'} state"] += 1
    return newest


@contextlib.contextmanager
def _small_disk(folder: Path, size: int) -> Iterator[Path | None]:
    """A file system of so many bytes; None where mounting is not allowed."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "torn", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
