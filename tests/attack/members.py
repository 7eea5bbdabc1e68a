"""Members that hold the secret and turn hostile. A job may fail then, but in order: named, on every rank, at once."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from shardwright import _core
from shardwright.communication import ucx_packages
from shardwright.config import load_config
from shardwright.rendezvous import _lines

from tests.jobs.built import build_hostile_member
from tests.jobs.door import ask, name_of
from tests.jobs.job import Job, torchrun_environment
from tests.jobs.patience import HANG_SECONDS

from .watch import PROGRAM, STEP_SECONDS, TOLERANCE, anonymous_mb

#: Errors by which a job ends in order.
NAMED = ("PeerLostError", "RemoteError", "StepMismatchError", "StallError", "JobStartError", "StepAborted")
#: Silence is noticed within the liveness timeout; UCX waits two seconds for TCP's word.
END_SECONDS = 40.0
LIVENESS = 6.0

#: What the example does over UCX, and as how many attacks it counts.
OVER_UCX = {
    "without the key": 201,
    "no name": 1,
    "no frame": 1,
    "a frame of another kind": 1,
    "a late message": 1,
    "the last message": 1,
    "a small early part": 1,
    "early parts twice": 2,
    "many early parts": 400,
    "many messages begun": 400,
    "a place in the buffer's head": 1,
    "a place that is not lent": 1,
    "a place beyond the end": 1,
    "a place that wraps around": 1,
    "a slot beyond the last": 1,
    "a place in device memory": 1,
    "a place beyond device memory": 1,
}


@dataclass
class Outcome:
    """How a job took one attack.

    Attributes:
        name: The attack.
        survived: In how many of its messages it was survived: all or none.
        attacks: How many messages it had.
        inexact: Steps that differ from plain PyTorch's.
        growth_mb: By how much a rank's memory grew at most.
        said: How the job ended, in short.
    """

    name: str
    survived: int
    attacks: int
    inexact: int
    growth_mb: float
    said: str


def frames() -> list[tuple[str, str]]:
    """Names and bytes of what a member may put on a connection."""
    lines = subprocess.run(
        [build_hostile_member(), "frames"], capture_output=True, text=True, check=True, timeout=HANG_SECONDS
    ).stdout
    return [(name, digits) for name, digits in (line.split("\t") for line in lines.splitlines())]


def places() -> list[tuple[str, str]]:
    """Of these, messages whose tensor lies at a place in shared memory that is none."""
    return [frame for frame in frames() if "place" in frame[0] or "slot" in frame[0]]


def over_tcp(configuration: dict[str, Any], ranks: int, wanted: list[tuple[str, str]]) -> Iterator[Outcome]:
    """One job after another, whose last rank writes bytes on its connections while all train."""
    keys = {"liveness_timeout_seconds": LIVENESS, **configuration}
    for name, digits in wanted:
        with Job(PROGRAM, ranks, [json.dumps(keys)]) as job:
            job.events("step", STEP_SECONDS, 5)
            before = [anonymous_mb(process.pid) for process in job.ranks]
            number = [len(process.events("step")) for process in job.ranks]
            job[ranks - 1].tell(digits)
            yield _outcome(name, 1, job, before, number, ranks - 1)


def over_ucx(ranks: int, wanted: Iterable[str] = OVER_UCX) -> Iterator[Outcome]:
    """Jobs that the example joins as their last rank; one for each of the attacks wanted."""
    keys: dict[str, Any] = {"pipeline_parallel_degree": ranks, "liveness_timeout_seconds": LIVENESS}
    keys |= {"microbatches": 4, "skip_tracing": True}  # as the program has it
    fingerprint = _lines(load_config(keys, {}, {}).fingerprint())
    program = build_hostile_member()
    for name in wanted:
        places: list[int] = []

        def launch(rank: int, world: int, port: int, places: list[int] = places) -> dict[str, str]:
            places.append(port)
            return torchrun_environment(rank, world, port)

        with _job_without_its_last(ranks, keys, launch) as job:
            port = places[0]
            told = ask(name_of(port), STEP_SECONDS)
            command = [program, name, ranks - 1, ranks, told.port, told.secret.hex(), _core.__version__, fingerprint]
            example = subprocess.Popen(
                [*map(str, command), ucx_packages()[0]], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            try:
                assert example.stdout is not None
                said = example.stdout.readline()
                assert said.startswith("sent "), example.communicate(timeout=HANG_SECONDS)
                before = [anonymous_mb(process.pid) for process in job.ranks]
                yield _outcome(name, OVER_UCX[name], job, before, None, ranks - 1)
            finally:
                example.kill()
                example.communicate()


def _job_without_its_last(ranks: int, keys: dict[str, Any], launch: Any) -> Job:
    def of_all(rank: int, world: int, port: int) -> dict[str, str]:
        return dict(launch(rank, ranks, port))

    return Job(PROGRAM, ranks - 1, [json.dumps(keys)], launch=of_all)


def _outcome(name: str, attacks: int, job: Job, before: list[float], number: list[int] | None, hostile: int) -> Outcome:
    """Whether the job goes on exactly, or ends on every other rank with an error that names the hostile one."""
    victims = [process for rank, process in enumerate(job.ranks) if rank != hostile]
    growth = 0.0

    def settled() -> bool:
        nonlocal growth
        for process, mb in zip(job.ranks, before, strict=True):
            try:
                growth = max(growth, anonymous_mb(process.pid) - mb)
            except OSError:
                continue
        if number is not None and all(
            len(process.events("step")) >= done + 8 for process, done in zip(job.ranks, number, strict=True)
        ):
            return True
        return not any(process.is_running() for process in victims)

    try:
        victims[0].wait_for("a verdict", lambda: settled() or None, END_SECONDS)
    except AssertionError:
        # The output of the first victim is over; the others may need a moment.
        if any(process.is_running() for process in victims) and not _ends(victims):
            return Outcome(name, 0, attacks, 0, growth, "neither goes on nor ends")
    inexact = sum(step["error"] > TOLERANCE for process in victims for step in process.events("step"))
    if any(process.is_running() for process in victims) and not inexact:
        return Outcome(name, attacks, attacks, 0, growth, "goes on")
    if not _ends(victims):
        return Outcome(name, 0, attacks, inexact, growth, "some ranks do not end")
    texts = []
    for process in victims:
        process.drained()
        lines = [line for line in process.err.splitlines() if any(f"{kind}: " in line for kind in NAMED)]
        texts.append(lines[-1] if lines else process.err[-300:])
    crashed = any(process.crashed() for process in victims)
    named = all(f"rank {hostile}" in text and any(kind in text for kind in NAMED) for text in texts)
    fine = named and not crashed and not inexact
    return Outcome(name, attacks if fine else 0, attacks, inexact, growth, texts[0].rpartition("errors.")[2][:150])


def _ends(victims: list[Any]) -> bool:
    try:
        for process in victims:
            process.wait(10.0)
    except subprocess.TimeoutExpired:
        return False
    return True
