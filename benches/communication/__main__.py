"""Measures messages between two processes: the library's beside a copy, Gloo, Open MPI and UCX's own test."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benches.communication import figures, ucx_perftest
from benches.communication.figures import KIB, MIB, SIZES, Measured
from benches.ranks import ROOT, Ranks, RanksError

EXAMPLE = "ucx_ping_pong"
#: What the processes of a pair run.
RANK = "benches.communication.rank"
#: Messages in flight until an acknowledgement.
WINDOWS = {64: 64, 4 * KIB: 64, 256 * KIB: 32, 4 * MIB: 16, 64 * MIB: 8}
#: Before each message of the rows "receiver asleep": far longer than anything spins.
PAUSE_SECONDS = 1e-3
#: No measurement begins later after the start: with it and with the end of all processes the run stays below 3 minutes.
MEASURE_SECONDS = 140.0
#: Those rows end here; a wake is nothing beside larger messages.
MAX_ASLEEP = 256 * KIB
#: The paths that have such a row take turns of so many round trips there, of which the first ones warm up.
TRIPS_ASLEEP, WARM_UP_TRIPS = 60, 10
#: Fast on one host in Open MPI 5: shared memory, without the kernel's copy across processes.
MPIRUN = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", "2"]
MPIRUN += ["--mca", "pml", "ob1", "--mca", "btl", "self,sm", "--mca", "smsc", "^cma"]
#: By path of the library or of another's: its pair's kind, and its row with a receiver asleep.
PATHS = {
    figures.OURS: ("shardwright", figures.OURS_ASLEEP),
    figures.GLOO: ("gloo", figures.GLOO_ASLEEP),
    figures.MPI: ("mpi", None),
}


class Bench:
    """One run: rounds over all sizes and paths, whose order changes from round to round."""

    def __init__(self, environment: Path, seconds: float, folder: Path) -> None:
        """Take what it needs.

        Args:
            environment: Where ``requirements/bench.txt`` is installed.
            seconds: How long to measure one quantity of one path at one size in one round.
            folder: For temporary files.
        """
        self.latency, self.bandwidth = Measured(), Measured()
        self._environment = environment
        self._seconds = seconds
        self._folder = folder
        self._pairs: dict[str, Ranks] = {}
        self._example = _build_example()
        (self._libucx,) = environment.glob("lib/python*/site-packages/libucx")

    def start(self, stack: contextlib.ExitStack) -> None:
        """Start the pairs, which live as long as ``stack``."""
        mpirun = [str(self._environment / "bin" / "mpirun"), *MPIRUN]
        mpi = {"python": self._environment / "bin" / "python", "launcher": mpirun}
        for path, (kind, _) in PATHS.items():
            pair = Ranks(RANK, kind, **mpi) if path == figures.MPI else Ranks(RANK, kind)  # type: ignore[arg-type]
            self._pairs[path] = stack.enter_context(pair)

    def round(self, number: int, deadline: float) -> bool:
        """Measure everything once; whether it was done before the deadline."""
        for size, name in SIZES.items():
            steps: list[tuple[str, Callable[[int], None]]] = [(figures.MEMCPY, self._memcpy)]
            for path in PATHS:
                steps.append((path, lambda size, path=path: self._messages(path, size)))  # type: ignore[misc]
            for setting in ucx_perftest.TRANSPORTS:
                steps.append((figures.UCX, lambda size, setting=setting: self._ucx(setting, size)))  # type: ignore[misc]
            if size == 4 * KIB and self._example is not None:
                steps.append((figures.IN_RUST, self._in_rust))
            if size <= MAX_ASLEEP:
                steps.append(("receivers asleep", self._asleep))
            turn = number % len(steps)
            for path, step in steps[turn:] + steps[:turn]:
                if time.monotonic() > deadline:
                    return False
                print(f"\rround {number + 1}: {name:8}{path:30}", end="", file=sys.stderr, flush=True)
                step(size)
        print(file=sys.stderr)
        return True

    def _memcpy(self, size: int) -> None:
        source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
        inner = max(1, 64 * KIB // size)
        np.copyto(target, source)  # warms it up
        taken: list[float] = []
        end = time.perf_counter() + self._seconds / 3
        while not taken or time.perf_counter() < end:
            began = time.perf_counter()
            for _ in range(inner):
                np.copyto(target, source)
            taken.append(1e6 * (time.perf_counter() - began) / inner)
        self.latency.add(figures.MEMCPY, size, statistics.median(taken))
        self.bandwidth.add(figures.MEMCPY, size, 1e-3 * size / statistics.median(taken))

    def _messages(self, path: str, size: int) -> None:
        pair = self._prepared(path, size)
        few = 5 if size <= MAX_ASLEEP else 2
        trip = self._last_of_growing(few, lambda count: pair.ask(do="latency", count=count)[0])
        self.latency.add(path, size, trip / 2)
        window = WINDOWS[size]
        taken = self._last_of_growing(1, lambda count: pair.ask(do="stream", count=count, window=window)[0])
        self.bandwidth.add(path, size, 1e-3 * size * window / taken)

    def _prepared(self, path: str, size: int) -> Ranks:
        pair = self._pairs[path]
        if not all(pair.ask(do="prepare", size=size)):
            raise RanksError(f"{path} delivered a message of {size} bytes that is not what was sent")
        return pair

    def _asleep(self, size: int) -> None:
        """The rows with a receiver asleep, by turns, whose first trips warm up: what a wake takes changes."""
        pairs = {row: self._prepared(path, size) for path, (_, row) in PATHS.items() if row is not None}
        trips: dict[str, list[float]] = {row: [] for row in pairs}
        end = time.monotonic() + 6 * self._seconds
        while time.monotonic() < end or not all(trips.values()):
            for row, pair in pairs.items():
                trips[row] += _trips_asleep(pair, TRIPS_ASLEEP)[WARM_UP_TRIPS:]
        for row, taken in trips.items():
            self.latency.add(row, size, statistics.median(taken) / 2)

    def _last_of_growing(self, count: int, measure: Callable[[int], float]) -> float:
        """What the last of several measurements gives, each twice as long, until the time of one quantity is over.

        The first ones warm up. Nobody can know beforehand how much fits into the time: on a busy machine a message may
        take a thousand times as long as the one before it.
        """
        end = time.monotonic() + self._seconds
        measure(count)
        while True:
            count *= 2
            measured = measure(count)
            if time.monotonic() >= end:
                return measured

    def _ucx(self, setting: str, size: int) -> None:
        scale = min(1.0, self._seconds / 0.15)
        transports = ucx_perftest.TRANSPORTS[setting]
        found = ucx_perftest.run(self._libucx, self._folder, transports, size, scale, seconds=10.0)
        for way in ucx_perftest.TESTS:
            path = f"{figures.UCX}, {way}, {setting}"
            if (line := found.get(f"{way}_latency")) is not None:
                self.latency.add(path, size, line.microseconds)
            if (line := found.get(f"{way}_stream")) is not None:
                self.bandwidth.add(path, size, line.gigabytes_per_second)

    def _in_rust(self, size: int) -> None:
        assert self._example is not None
        microseconds = ucx_perftest.spinning_in_rust(self._example, self._libucx, size)
        if microseconds is not None:
            self.latency.add(figures.IN_RUST, size, microseconds)


def _trips_asleep(pair: Ranks, count: int) -> list[float]:
    """Round trips in microseconds, without the pauses in them."""
    trips, held = pair.ask(do="latency", count=count, pause=PAUSE_SECONDS)
    return [trip - hold for trip, hold in zip(trips, held, strict=True)]


def _build_example() -> Path | None:
    """The program that measures inside Rust, or None where there is none."""
    if not (ROOT / "crates" / "ucx" / "examples" / f"{EXAMPLE}.rs").exists():
        print(f"crates/ucx/examples/{EXAMPLE}.rs is missing: lat4k_spin_us cannot be measured", file=sys.stderr)
        return None
    command = ["cargo", "build", "--quiet", "--release", "--package", "shardwright-ucx", "--example", EXAMPLE]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    return Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release" / "examples" / EXAMPLE


def main() -> int:
    parser = argparse.ArgumentParser(prog="make bench-comm", description=__doc__)
    parser.add_argument("--environment", type=Path, default=ROOT / ".cache" / "bench-communication")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one short round: whether it works, not how fast it is")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}; it has to be 1 or more")
    rounds, seconds = (1, 0.03) if args.quick else (args.rounds, 0.15)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-communication-")))
        bench = Bench(args.environment.absolute(), seconds, folder)
        deadline = time.monotonic() + MEASURE_SECONDS  # what had to be built is built
        bench.start(stack)
        done = 0
        while done < rounds and bench.round(done, deadline):
            done += 1
    latency, bandwidth = bench.latency, bench.bandwidth
    latency.add_best(figures.UCX_BEST, figures.UCX + ", ", "min")
    bandwidth.add_best(figures.UCX_BEST, figures.UCX + ", ", "max")
    ours = (figures.OURS, figures.OURS_ASLEEP, figures.IN_RUST, figures.GLOO, figures.GLOO_ASLEEP, figures.MPI)
    settings = sorted(
        path for path in bandwidth.rounds if path.startswith(f"{figures.UCX}, ") and path != figures.UCX_BEST
    )
    paths = (figures.MEMCPY, *ours, *settings, figures.UCX_BEST)
    if done < rounds:
        print(f"\nthe machine is slow or busy: {done} of {rounds} rounds were done in time", file=sys.stderr)
    print(figures.table("one-way latency, microseconds", latency, paths, list(SIZES)), end="\n\n")
    print(figures.table("streaming, GB/s", bandwidth, paths, list(SIZES)), end="\n\n")
    compared = figures.compare(latency, bandwidth)
    return figures.conclude(compared, figures.BARS)


if __name__ == "__main__":
    sys.exit(main())
