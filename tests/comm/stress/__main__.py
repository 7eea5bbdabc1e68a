"""Many messages among processes, and kills: a table, and a last line of JSON.

usage: python -m tests.comm.stress [--messages 100000] [--minutes 3] [--kills 50] [--ranks 4] [--seed 0]
                                   [--transport NAME]

The exit code is 1 when a message was lost, damaged or overtaken, when a survivor did not name the killed rank within
five seconds, when a process or a file of shared memory was left over, or when memory grew. Whether it does is seen in
runs of two minutes or more.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections import Counter
from os import kill
from pathlib import Path
from typing import Any

import shardwright as smp

from tests.jobs.patience import HANG_SECONDS, slowdown

from .ranks import Job, Rank, shared_memory, shared_memory_in_use
from .traffic import Traffic

END_SECONDS = 20.0
REPORT_SECONDS = 5.0
#: A kill comes so many seconds after the messages have begun to flow, at most.
LATEST_KILL_SECONDS = 1.0
#: A quarter of the shortest run that tells whether memory grows; there is a sample each second.
QUARTER_SECONDS = 30
#: What the allocators of Python and of the C library may add once caches are filled.
MAX_GROWTH_MB = 32.0


def resident_mb() -> tuple[float, float]:
    """The memory that this process holds: all of it, and what of it is shared."""
    _, resident, shared, *_ = (int(pages) * 4096 / 2**20 for pages in Path("/proc/self/statm").read_text().split())
    return resident, shared


def growth(samples: list[tuple[float, float]]) -> float:
    """From the second quarter of the run to its last, the medians' difference; nothing is said of a shorter run.

    Until then, allocators' caches and shared buffers are used for the first time.
    """
    if len(samples) < 4 * QUARTER_SECONDS:
        return 0.0
    quarter = len(samples) // 4
    resident = [mb for mb, _ in samples]
    early, late = sorted(resident[quarter : 2 * quarter]), sorted(resident[-quarter:])
    return late[quarter // 2] - early[quarter // 2]


class Stress:
    """The options, and both parts of the test."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.result: Counter[str] = Counter()
        self.growth_mb = 0.0
        self.violations: list[str] = []

    def _join(self) -> None:
        keys: dict[str, Any] = {"pipeline_parallel_degree": self.options.ranks, "microbatches": self.options.ranks}
        if self.options.transport is not None:
            keys["transport"] = self.options.transport
        smp.init(keys)

    def _count_messages(self, me: Rank) -> None:
        """A rank of the first part."""
        self._join()
        until = time.monotonic() + 60 * self.options.minutes
        traffic = Traffic(self.options.seed, self.options.messages, until)
        samples: list[tuple[float, float]] = []
        traffic.start()
        finished = traffic.join(lambda: samples.append(resident_mb()))
        me.say(counts=traffic.counts, finished=finished, loss=traffic.loss, samples=samples)
        if finished:
            smp.barrier()
        smp.shutdown()

    def messages(self) -> None:
        """All arrive once, intact and in order; memory is flat."""
        began = time.monotonic()
        with Job(self.options.ranks, self._count_messages) as job:
            totals: Counter[str] = Counter()
            limit = time.monotonic() + HANG_SECONDS + 60 * self.options.minutes + self.options.messages / 100
            for rank, process in enumerate(job.ranks):
                said = process.hear(limit)
                if said is None or not said["finished"]:
                    self.violations.append(f"rank {rank} did not finish its messages: {said}")
                    continue
                totals.update(said["counts"])
                samples = said["samples"]
                self.growth_mb = max(self.growth_mb, growth(samples))
                shown = " ".join(f"{mb:.0f}({own:.0f})" for mb, own in samples[:: max(1, len(samples) // 10)])
                received = said["counts"]["received"]
                print(f"rank {rank}: {received:,} received; MiB over time (shared): {shown}", flush=True)
            job.end(END_SECONDS)
        seconds = time.monotonic() - began
        self.result.update({name: totals[name] for name in ("damaged", "reordered")})
        self.result["messages"] = totals["received"]
        self.result["lost"] = max(totals["lost"], totals["sent"] - totals["received"])
        self.result["left_over"] += job.left_over
        print(f"{totals['received']:,} messages of {totals['sent']:,} sent arrived in {seconds:.0f} s", flush=True)
        print(f"lost {self.result['lost']}, damaged {totals['damaged']}, reordered {totals['reordered']}")
        print(f"memory grew by at most {self.growth_mb:.1f} MiB on any rank", flush=True)

    def _await_kill(self, me: Rank) -> None:
        """A rank of the second part: sends until a rank is lost, and stays until all have seen it."""
        self._join()
        traffic = Traffic(self.options.seed, 0, time.monotonic() + 10 * HANG_SECONDS)
        traffic.start()
        me.say(event="running")
        traffic.await_loss(HANG_SECONDS)
        me.say(event="lost", loss=traffic.loss)
        me.hear(time.monotonic() + HANG_SECONDS)
        smp.shutdown()

    def kills(self) -> None:
        """Every survivor names the killed rank in time, and nothing is left over."""
        draw = random.Random(self.options.seed)
        slowest = 0.0
        for number in range(self.options.kills):
            victim = draw.randrange(self.options.ranks)
            moment = draw.uniform(0.0, LATEST_KILL_SECONDS)
            before = shared_memory()
            with Job(self.options.ranks, self._await_kill) as job:
                slowest = max(slowest, self._kill_one(job, number, victim, moment))
            self.result["left_over"] += job.left_over
            left = shared_memory() - before
            if left and (left := left - shared_memory_in_use()):
                self.violations.append(f"kill {number}: left in shared memory: {sorted(left)}")
                self.result["left_over"] += len(left)
        self.result["kills"] = self.options.kills
        if self.options.kills:
            reports = self.options.kills * (self.options.ranks - 1)
            print(f"{self.result['reports']} of {reports} survivors named the killed rank in time", flush=True)
            print(f"the slowest took {slowest:.2f} s; {self.result['left_over']} left over")

    def _kill_one(self, job: Job, number: int, victim: int, moment: float) -> float:
        """Kill a rank and hear the others; the longest time until one of them said so."""
        start = time.monotonic() + HANG_SECONDS
        if not all(rank.hear(start) for rank in job.ranks):
            self.violations.append(f"kill {number}: the job did not start")
            return 0.0
        time.sleep(moment)
        kill(job.ranks[victim].pid, signal.SIGKILL)
        killed = time.monotonic()
        slowest = 0.0
        survivors = [rank for rank in range(self.options.ranks) if rank != victim]
        for rank in survivors:
            said = job.ranks[rank].hear(killed + HANG_SECONDS)
            loss = said and said["loss"]
            if not loss or loss[0] != victim or loss[2] - killed > REPORT_SECONDS * slowdown():
                self.violations.append(f"kill {number} of rank {victim} after {moment:.3f} s: rank {rank} said {loss}")
                continue
            slowest = max(slowest, loss[2] - killed)
            self.result["reports"] += 1
        for rank in survivors:
            job.ranks[rank].say(go="end")
        job.end(END_SECONDS)
        return slowest


def main() -> int:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000, help="in all")
    parser.add_argument("--minutes", type=float, default=3.0, help="go on sending for at least so long")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transport", help="the configuration key of this name")
    stress = Stress(parser.parse_args())
    stress.messages()
    stress.kills()
    result = stress.result
    report = {name: result[name] for name in ("messages", "lost", "damaged", "reordered", "kills")}
    in_time = result["reports"] == result["kills"] * (stress.options.ranks - 1)
    report |= {"reported_within_5_s": result["reports"], "left_over": result["left_over"]}
    for violation in stress.violations:
        print(violation, file=sys.stderr)
    print(json.dumps({**report, "rss_growth_mb": round(stress.growth_mb, 1)}))
    wrong = any(result[name] for name in ("lost", "damaged", "reordered", "left_over"))
    return int(bool(wrong or stress.violations or not in_time or stress.growth_mb > MAX_GROWTH_MB))


if __name__ == "__main__":
    sys.exit(main())
