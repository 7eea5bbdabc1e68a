"""Measures a GPT-2's training step over two tp ranks beside DTensor and a split by hand, and asynchronous linears."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benches import beside
from benches.communication.figures import Bar, conclude
from benches.ranks import Ranks
from benches.tensor_parallel.sequence import KINDS

TRAINING = ("dtensor", "hand", "speed", "memory")
#: Those of them that are the library.
OURS = ("speed", "memory")
ROUNDS = 9
WARM_UP = 2
#: Forward and backward passes of the parallel linears in one measurement.
PASSES = 20
PASS_ROUNDS = 25
LIMIT_SECONDS = 180.0
#: In single precision, relative to the largest element.
TOLERANCE = 1e-3
#: The C library gives back at once what a tensor no longer needs. Otherwise it keeps some, more or less by chance, and
#: a process is larger than what it holds.
NO_RESERVE = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
BARS = {
    "vs_dtensor": Bar(">=", 1.2),
    "vs_hand": Bar(">=", 1.0),
    "async_vs_plain": Bar(">=", 1.05),
    "memory_vs_speed": Bar("<", 1.0),
}


class Measured:
    """What was seen of one side.

    Attributes:
        seconds: Of each step that counts.
        cpu_seconds: Of processors, both ranks together.
        peak_bytes: By rank.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.peak_bytes: list[int] = []

    def add(self, answers: list[dict[str, float]]) -> None:
        """Keep what both ranks say of a step."""
        self.seconds.append(max(a["ended"] for a in answers) - min(a["began"] for a in answers))
        self.cpu_seconds.append(sum(a["cpu"] for a in answers))


def times_as_fast(one: Measured, than: Measured) -> float:
    """How many times as fast one is as another: the median over rounds."""
    return statistics.median(b / a for a, b in zip(one.seconds, than.seconds, strict=True))


def train(rounds: int) -> tuple[dict[str, Measured], list[str]]:
    """Steps of all sides in turns, and what was wrong."""
    measured = {name: Measured() for name in TRAINING}
    wrong = []
    with contextlib.ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))) / "reference.pt"
        subprocess.run([sys.executable, "-m", "benches.tensor_parallel.reference", str(file)], check=True)
        jobs = {name: stack.enter_context(Ranks("benches.tensor_parallel.rank", f"{name},{file}")) for name in TRAINING}
        for name, job in jobs.items():
            job.ask(limit=LIMIT_SECONDS, do="build")
            for rank, error in enumerate(job.ask(limit=LIMIT_SECONDS, do="error")):
                print(f"{name}, rank {rank}: {error}", file=sys.stderr)
                if not max(error.values()) <= TOLERANCE:
                    wrong.append(f"wrong: {name} is off by {error} on rank {rank}")
        for number in range(WARM_UP + rounds):
            turn = number % len(TRAINING)
            for name in TRAINING[turn:] + TRAINING[:turn]:
                print(f"\rround {number + 1}: {name:10}", end="", file=sys.stderr, flush=True)
                answers = jobs[name].ask(limit=LIMIT_SECONDS, do="step")
                if number >= WARM_UP:
                    measured[name].add(answers)
        for job in jobs.values():
            job.close()
        for name in TRAINING:
            measured[name].peak_bytes = _weigh(name, file)
    print(file=sys.stderr)
    return measured, wrong


def _weigh(name: str, file: Path) -> list[int]:
    """The peak of each rank of a side, in its second step: the first one makes the optimizer's state."""
    with Ranks("benches.tensor_parallel.rank", f"{name},{file}", environment=NO_RESERVE) as job:
        for command in ("build", "step"):
            job.ask(limit=LIMIT_SECONDS, do=command)
        peaks: list[int] = job.ask(limit=LIMIT_SECONDS, do="peak_bytes")
    return peaks


def pass_through(rounds: int) -> tuple[dict[str, Measured], list[str]]:
    """Passes through parallel linears of both kinds in turns, and what was wrong."""
    measured = {kind: Measured() for kind in KINDS}
    with Ranks("benches.tensor_parallel.rank", "sequence,") as job:
        job.ask(limit=LIMIT_SECONDS, do="build")
        error = max(job.ask(limit=LIMIT_SECONDS, do="error"))
        for number in range(WARM_UP + rounds):
            for kind in KINDS if number % 2 else reversed(KINDS):
                answers = job.ask(limit=LIMIT_SECONDS, do="passes", kind=kind, number=PASSES)
                if number >= WARM_UP:
                    measured[kind].add(answers)
    return measured, [f"wrong: asynchronous and plain linears differ by {error}"] if error > TOLERANCE else []


def compare_commits(commit: str, at_most: float, rounds: int) -> int:
    """Steps of this commit and of another one in turns, and how many times as long this one's take."""
    sides = {"this": {}, commit: beside.variables_of(commit)}
    jobs: dict[tuple[str, str], Ranks] = {}
    measured: dict[tuple[str, str], Measured] = {}
    with contextlib.ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))) / "reference.pt"
        subprocess.run([sys.executable, "-m", "benches.tensor_parallel.reference", str(file)], check=True)
        for key in ((name, side) for name in OURS for side in sides):
            module, kind = "benches.tensor_parallel.rank", f"{key[0]},{file}"
            jobs[key] = stack.enter_context(Ranks(module, kind, environment=sides[key[1]]))
            jobs[key].ask(limit=LIMIT_SECONDS, do="build")
            measured[key] = Measured()
        for number in range(WARM_UP + rounds):
            for key in list(jobs)[:: 1 if number % 2 else -1]:
                print(f"\rround {number + 1}: {' '.join(key)[:20]:20}", end="", file=sys.stderr, flush=True)
                answers = jobs[key].ask(limit=LIMIT_SECONDS, do="step")
                if number >= WARM_UP:
                    measured[key].add(answers)
        for job in jobs.values():
            job.close()
    print(file=sys.stderr)
    for key, one in measured.items():
        print(f"{' of '.join(key)[:32]:32}{statistics.median(one.seconds):10.3f} s/step")
    figures = {f"{name}_vs_beside": beside.ratio(*(measured[name, side].seconds for side in sides)) for name in OURS}
    return beside.conclude(figures, at_most)


def table(training: dict[str, Measured], passes: dict[str, Measured]) -> str:
    """A line for each side."""
    ours = training["speed"]
    lines = [f"{'side':24}{'s/step':>10}{'CPU s/step':>12}{'speed is x':>12}{'peak MB, rank 0/1':>20}"]
    for name, one in training.items():
        memory = "/".join(f"{each / 1e6:.0f}" for each in one.peak_bytes)
        seconds, cpu = statistics.median(one.seconds), statistics.median(one.cpu_seconds)
        lines.append(f"{name:24}{seconds:10.3f}{cpu:12.3f}{times_as_fast(ours, one):12.3f}{memory:>20}")
    lines += ["", f"{'parallel linears':24}{'ms/pass':>10}{'CPU ms/pass':>12}"]
    for name, one in passes.items():
        seconds, cpu = (1e3 * statistics.median(of) / PASSES for of in (one.seconds, one.cpu_seconds))
        lines.append(f"{name:24}{seconds:10.3f}{cpu:12.3f}")
    return "\n".join(lines)


def main() -> int:
    """Measure, print, and say whether the bars are met."""
    parser = argparse.ArgumentParser(prog="make bench-tp", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds: whether it works, not how fast")
    beside.add_argument(parser)
    args = parser.parse_args()
    if args.beside:
        return compare_commits(args.beside, args.at_most, 2 if args.quick else ROUNDS)
    passes, wrong = pass_through(2 if args.quick else PASS_ROUNDS)
    training, wrong_too = train(2 if args.quick else ROUNDS)
    print("\n".join([table(training, passes), "", *wrong, *wrong_too]))
    ours = training["speed"]
    memory = max(a / b for a, b in zip(training["memory"].peak_bytes, ours.peak_bytes, strict=True))
    figures: dict[str, float | None] = {
        "vs_dtensor": times_as_fast(ours, training["dtensor"]),
        "vs_hand": times_as_fast(ours, training["hand"]),
        "async_vs_plain": times_as_fast(passes["asynchronous"], passes["plain"]),
        "memory_vs_speed": memory,
    }
    missed = conclude(figures, BARS)
    return 1 if missed or wrong or wrong_too else 0


if __name__ == "__main__":
    sys.exit(main())
