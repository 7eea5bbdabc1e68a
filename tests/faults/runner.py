"""Runs cases in jobs of real processes, and judges what came of each."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.elastic.runs import lost_and_repeated, without_launcher
from tests.faults.cases import LAYOUTS, RESTARTED, Case
from tests.jobs.job import Job

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-10
#: Who has not said by then what came of a fault, hangs.
HANG_SECONDS = 15.0
STOPPED_SECONDS = 3.0
#: How long a rank may be silent where one is stopped for ever.
LIVENESS_SECONDS = 2
START_SECONDS = 60.0


@dataclass
class Outcome:
    """What came of a case.

    Attributes:
        case: It.
        hung: Whether a rank did not come to an end, or came to one that nobody may come to.
        inexact: Whether a step after it was not that of one process, without an error that says so.
        unnamed: Whether an error on another rank does not name the rank where it arose.
        seconds: How long after the fault the last rank raised; None where none did.
        note: What is wrong, in words.
    """

    case: Case
    hung: bool = False
    inexact: bool = False
    unnamed: bool = False
    seconds: float | None = None
    note: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether anything is wrong."""
        return self.hung or self.inexact or self.unnamed


class Broken(Exception):
    """The job is of no further use."""


class Session:
    """A job whose ranks take one case after another."""

    def __init__(self, layout: str, starts: Case | None = None, **keys: Any) -> None:
        pp, tp, dp = LAYOUTS[layout]
        self.folder = tempfile.TemporaryDirectory(prefix="shardwright-faults-")
        given = {
            "degrees": (pp, tp, dp),
            "keys": keys,
            "starts": None if starts is None else starts.as_dict(),
            "folder": self.folder.name,
        }
        path = f"{ROOT / 'python'}:{ROOT}"
        program = str(Path(__file__).with_name("rank"))
        self.job = Job(program, pp * tp * dp, [json.dumps(given)], environment=lambda rank: {"PYTHONPATH": path})
        self.heard: dict[str, list[int]] = {}

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.job.__exit__()
        self.folder.cleanup()

    def start(self) -> None:
        """Wait until all ranks train."""
        for number in range(2):
            self.all("exact", START_SECONDS, number)

    def all(self, event: str, limit: float, number: int, but: Iterable[int] = ()) -> list[dict[str, Any]]:
        """The event of every rank.

        Raises:
            Broken: One does not come.
        """
        said = []
        for rank, process in enumerate(self.job.ranks):
            if rank in but:
                continue
            try:
                said.append(process.event(event, limit, number))
            except AssertionError as error:
                raise Broken(f"rank {rank}: {error}") from None
        return said

    def tell(self, value: Any, but: Iterable[int] = ()) -> None:
        """Say something to all ranks."""
        for rank, process in enumerate(self.job.ranks):
            if rank not in but:
                process.tell(json.dumps(value))

    def exchange(self, event: str, number: int, but: Iterable[int] = ()) -> list[dict[str, Any]]:
        """Hear what all ranks say, and tell them."""
        said = self.all(event, HANG_SECONDS, number, but)
        self.tell(said, but)
        return said


def run_caught(layout: str, cases: Sequence[Case], done: Callable[[Outcome], None]) -> None:
    """Cases after which a job goes on; after one that it does not survive, the others have a job of their own."""
    left = list(cases)
    while left:
        with Session(layout, liveness_timeout_seconds=8) as session:
            try:
                session.start()
            except Broken as error:
                for case in left:
                    done(Outcome(case, hung=True, note=f"the job does not start: {error}"))
                return
            counts: dict[str, int] = {}
            while left:
                case = left.pop(0)
                outcome = Outcome(case)
                try:
                    take_caught(session, outcome, counts)
                except Broken as error:
                    outcome.hung, outcome.note = True, str(error)
                done(outcome)
                if outcome.is_bad:
                    break


def take_caught(session: Session, outcome: Outcome, counts: dict[str, int]) -> None:
    """One case after which the job goes on."""
    case = outcome.case

    def next_number(event: str) -> int:
        counts[event] = counts.get(event, -1) + 1
        return counts[event]

    faults = len(session.job[case.rank].events("fault"))
    session.tell(case.as_dict())
    if case.fault.startswith("stop"):
        wait_for_fault(session, case, faults)
        time.sleep(STOPPED_SECONDS)
        session.job[case.rank].signal(signal.SIGCONT)
    said = session.exchange("tried", next_number("tried"))
    at = session.job[case.rank].events("fault")[faults:]
    if not at and case.fault not in ("dropped model", "other model", "other step function"):
        outcome.hung, outcome.note = True, "the fault did not come about"
        return
    judge_names(outcome, said)
    if at:
        outcome.seconds = max((each["error"]["at"] - at[0]["at"] for each in said if each["error"]), default=None)
    moved = [each["updated"] for each in said]
    if any(moved) and not all(moved):
        refused = session.exchange("refused", next_number("refused"))
        judge_names(outcome, refused)
        if not all(each["error"] for each in refused):
            outcome.inexact, outcome.note = True, f"weights differ, and a step ran: {refused}"
            return
    for each in session.exchange("after", next_number("after")):
        if each["error"] is not None or not each["worst"] < TOLERANCE:
            outcome.inexact, outcome.note = True, f"the next step: {_short(each)}; before: {_short(said)}"


def wait_for_fault(session: Session, case: Case, number: int) -> None:
    """Wait until a rank is stopped."""
    session.job[case.rank].event("fault", HANG_SECONDS, number)


def _short(said: Any) -> str:
    return re.sub(r"\\n\\nThe traceback.*?(?=', 'at')", "", str(said))[:1500]


def judge_names(outcome: Outcome, said: Iterable[dict[str, Any]]) -> None:
    """Look whether errors of other ranks name the one where the fault was."""
    for rank, each in enumerate(said):
        error = each["error"]
        # Of two models that differ, nobody knows which is the right one.
        names = range(outcome.case.world) if outcome.case.fault == "other model" else [outcome.case.rank]
        if error is not None and rank != outcome.case.rank and not any(is_named(error, one) for one in names):
            outcome.unnamed, outcome.note = True, f"rank {rank}: {error}"


def is_named(error: dict[str, Any], rank: int) -> bool:
    """Whether an error is the library's, and names a rank."""
    return bool(error["from_library"] and re.search(rf"\branks? \[?([\d, ]*\b)?{rank}\b", error["text"]))


def run_ending(case: Case) -> Outcome:
    """A case that ends a rank."""
    outcome = Outcome(case)
    keys = {"liveness_timeout_seconds": LIVENESS_SECONDS} if case.waits_by_contract else {}
    try:
        with Session(case.layout, **keys) as session:
            session.start()
            session.tell(case.as_dict())
            but = [case.rank]
            wait_for_fault(session, case, 0)
            at = session.job[case.rank].events("fault")[0]["at"]
            said = session.exchange("tried", 0, but)
            if not all(each["error"] for each in said):
                moved = [each["updated"] for each in said]
                if any(moved) and not all(moved):
                    session.exchange("refused", 0, but)
                after = session.exchange("after", 0, but)
                said = [one if one["error"] else two for one, two in zip(said, after, strict=True)]
            for each in said:
                if not each["error"]:
                    outcome.inexact, outcome.note = True, "a step ran without the rank that is gone"
                elif not is_named(each["error"], case.rank):
                    outcome.unnamed, outcome.note = True, str(each["error"])
                else:
                    outcome.seconds = max(outcome.seconds or 0.0, each["error"]["at"] - at)
    except Broken as error:
        outcome.hung, outcome.note = True, str(error)
    return outcome


def run_restarted(case: Case) -> Outcome:
    """A rank is killed right after a save in the background; the others end, and the job is started anew with them."""
    outcome = Outcome(case)
    steps = 20
    with tempfile.TemporaryDirectory(prefix="shardwright-faults-") as folder:
        try:
            run = without_launcher(Path(folder), case.world, "saved 16", "--steps", str(steps), seconds=START_SECONDS)
            lost = lost_and_repeated(run, steps)
            outcome.inexact = lost != (0, 0) or len(run.losses) != steps
            outcome.note = f"samples lost and repeated: {lost}" if outcome.inexact else ""
        except subprocess.TimeoutExpired as error:
            outcome.hung, outcome.note = True, f"a rank that was left did not end: {error}"
        except AssertionError as error:
            outcome.unnamed, outcome.note = True, str(error)[:1500]
    return outcome


def run_short(case: Case) -> Outcome:
    """A case in which something is missing from the start."""
    outcome = Outcome(case)
    with Session(case.layout, case, connect_timeout_seconds=20) as session:
        began = time.monotonic()
        ended: list[dict[str, Any] | None] = []
        for process in session.job.ranks:
            try:
                process.wait_for(
                    "end of the start",
                    lambda process=process: len(process.events("exact")) == 2 or process.events("ended"),  # type: ignore[misc]
                    HANG_SECONDS,
                )
            except AssertionError as error:
                outcome.hung, outcome.note = True, str(error)[:3000]
                return outcome
            ended.append((process.events("ended") or [{"error": None}])[0]["error"])
        if any(ended) and not all(ended):
            outcome.hung, outcome.note = True, f"some ranks have started, and some not: {ended}"
        for error in filter(None, ended):
            outcome.seconds = max(outcome.seconds or 0.0, error["at"] - began)
            if not error["from_library"] or not re.search(r"rank.*\d", error["text"]):
                outcome.unnamed, outcome.note = True, str(error)
        if not any(ended):
            worst = max(each["error"] for process in session.job.ranks for each in process.events("exact"))
            outcome.inexact = not worst < TOLERANCE
    return outcome


def run(cases: Sequence[Case], workers: int, done: Callable[[Outcome], None]) -> list[Outcome]:
    """Run cases, several jobs at a time; in the order of ``cases``."""
    outcomes: dict[Case, Outcome] = {}
    lock = threading.Lock()

    def take(outcome: Outcome) -> None:
        with lock:
            outcomes[outcome.case] = outcome
            done(outcome)

    with ThreadPoolExecutor(workers) as pool:
        futures = []
        for layout in LAYOUTS:
            caught = [case for case in cases if case.layout == layout and not case.ends and not case.starts]
            if caught:
                futures.append(pool.submit(run_caught, layout, caught, take))
        for case in cases:
            if case.ends or case.starts:
                ending = run_restarted if case.fault == RESTARTED else run_ending
                one = run_short if case.starts else ending
                futures.append(pool.submit(lambda one=one, case=case: take(one(case))))  # type: ignore[misc]
        for future in futures:
            future.result()
    return [outcomes[case] for case in cases]
