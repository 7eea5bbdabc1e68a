"""Measures peak memory and time of a GPT-2's training step with each feature that saves memory, over several ranks."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from typing import Any

from benches.memory.rows import ROWS, Row, missed_bars
from benches.ranks import Ranks, RanksError

#: The first step divides the model, the second makes the optimizer's state.
WARM_UP, ROUNDS = 2, 3
LIMIT_SECONDS = 300.0
#: Losses of the last step may differ by this, relatively: sums have another order.
TOLERANCE = 1e-3
#: Freed memory goes back to the system at once, on both sides, so that resident memory is what is in use.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}


def measure(row: Row, rounds: int) -> dict[str, Any]:
    """Train as one row does, in a job of its own.

    Returns:
        The name; the largest peak, optimizer state in memory and offloaded bytes of a rank; by rank the peak (the
        median over the steps of what each had in memory at most), the offloaded bytes and the activations that a step
        moves out; the median seconds of a step; and the loss.
    """
    with Ranks("benches.memory.rank", row.name, row.ranks, environment=_ALLOCATOR) as job:
        job.ask(limit=LIMIT_SECONDS, do="build")
        seconds, peaks, loss = [], [], 0.0
        for number in range(WARM_UP + rounds):
            job.ask(do="forget_peak")
            print(f"\r{row.name}: step {number + 1} of {WARM_UP + rounds}   ", end="", file=sys.stderr, flush=True)
            answers = job.ask(limit=LIMIT_SECONDS, do="step")
            if number >= WARM_UP:
                seconds.append(max(a["ended"] for a in answers) - min(a["began"] for a in answers))
                peaks.append(job.ask(do="peak_bytes"))
            loss = statistics.mean(a["loss"] for a in answers)
        print(file=sys.stderr)
        offloaded = job.ask(do="offloaded_bytes")
        by_rank = [round(statistics.median(of_rank)) for of_rank in zip(*peaks, strict=True)]
        return {
            "name": row.name,
            "peak_bytes": max(by_rank),
            "step_seconds": round(statistics.median(seconds), 3),
            "optimizer_bytes": max(job.ask(do="optimizer_bytes")),
            "offloaded_bytes": max(offloaded),
            "peaks": by_rank,
            "offloaded": offloaded,
            "moved": job.ask(do="moved_bytes"),
            "loss": loss,
        }


def disk_bandwidth(nbytes: int = 256 << 20) -> tuple[float, float]:
    """Return the bytes a second that the disk of the temporary directory takes and gives, past the page cache."""
    block = os.urandom(8 << 20)
    with tempfile.TemporaryFile() as file:
        began = time.monotonic()
        for _ in range(nbytes // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        written = time.monotonic()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        begin = time.monotonic()
        while file.read(len(block)):
            pass
        return nbytes / (written - began), nbytes / (time.monotonic() - begin)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="measure rows whose name contains this")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="steps that count, of each row")
    arguments = parser.parse_args()
    rows, failed = [], 0
    for row in ROWS:
        if arguments.only not in row.name:
            continue
        try:
            rows.append(measure(row, arguments.rounds))
        except RanksError as error:
            failed += 1
            print(f"\n{row.name}: {error}", file=sys.stderr)
    print(f"{'':42}{'peak MiB':>12}{'optimizer MiB':>16}{'offloaded MiB':>16}{'seconds':>10}{'loss':>10}")
    for found in rows:
        sizes = (found[key] / (1 << 20) for key in ("peak_bytes", "optimizer_bytes", "offloaded_bytes"))
        peak, state, out = sizes
        print(
            f"{found['name']:42}{peak:12.0f}{state:16.1f}{out:16.1f}{found['step_seconds']:10.2f}{found['loss']:10.5f}"
        )
    bandwidth = disk_bandwidth()
    writes, reads = (each / (1 << 20) for each in bandwidth)
    print(f"the disk of {tempfile.gettempdir()} writes {writes:.0f} MiB/s and reads {reads:.0f} MiB/s")
    for found in rows:
        if abs(found["loss"] / rows[0]["loss"] - 1) > TOLERANCE:
            failed += 1
            print(f"{found['name']}: the loss differs from that of {rows[0]['name']}")
    for line in missed_bars(rows, bandwidth):
        failed += 1
        print(f"missed: {line}")
    disk = {"write_mib_per_second": round(writes), "read_mib_per_second": round(reads)}
    print(json.dumps({"rows": rows, "disk": disk, "failed": failed}), flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
