"""Random divided programs beside plain torch: ``make programs``; see ``--help``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time

import torch

from tests.jobs.forked import fork_server
from tests.programs.running import run_plain
from tests.programs.summary import Summary
from tests.programs.trials import FOUND, describe, draw_program, jobs, stored, try_program
from tests.programs.workers import try_with_workers

#: The largest share of programs that may be refused.
MAX_REFUSED = 0.05
#: The smallest shares in which something crosses ranks, and in which gradients come back.
MIN_CROSSED = (0.85, 0.7)
_REPORT_SECONDS = 60.0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="make programs", description=__doc__)
    parser.add_argument("--count", type=int, default=5000, help="how many programs (5000)")
    parser.add_argument("--start", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--processes-share", type=float, default=0.02, help="how many run in real processes (0.02)")
    parser.add_argument("--workers", type=int, default=2, help="how many are tried at once (2)")
    parser.add_argument("--show", type=int, metavar="SEED", help="print one program and its outcome")
    parser.add_argument("--store", type=int, metavar="SEED", help="print one program as a line to be kept")
    parser.add_argument("--found", action="store_true", help="try the programs that once went wrong")
    parser.add_argument("--line", help="try the program of this line, or of standard input if it is -")
    arguments = parser.parse_args()
    if arguments.store is not None:
        program, _, _ = draw_program(arguments.store, True, arguments.processes_share)
        print(json.dumps(dataclasses.asdict(program)))
        return 0
    if arguments.show is not None or arguments.found or arguments.line:
        return one_by_one(arguments)
    fork_server()  # one for all workers
    summary, began = Summary([], MAX_REFUSED), time.monotonic()
    said = began
    seeds = range(arguments.start, arguments.start + arguments.count)
    for trial in try_with_workers(seeds, arguments.workers, arguments.processes_share):
        summary.trials.append(trial)
        if trial.verdict in ("wrong", "hung", "crashed"):
            print(f"seed {trial.seed} is {trial.verdict}: {trial.why[:300]!r}", file=sys.stderr, flush=True)
        if (now := time.monotonic()) - said > _REPORT_SECONDS:
            said = now
            rate = len(summary.trials) / (now - began)
            print(f"{summary.as_json()} {rate:.1f} a second", file=sys.stderr, flush=True)
    print(summary.table())
    print(f"seeds {seeds.start} to {seeds.stop - 1}, {time.monotonic() - began:.0f} s")
    print(summary.as_json())
    crosses = all(share >= least for share, least in zip(summary.crossed, MIN_CROSSED, strict=True))
    return 0 if summary.passes and crosses else 1


def one_by_one(arguments: argparse.Namespace) -> int:
    """Try some programs in this process, and say what comes of them."""
    torch.set_num_threads(1)
    good = True
    with jobs() as on:
        if arguments.show is not None:
            programs = [draw_program(arguments.show, True, arguments.processes_share)[0]]
        else:
            lines = FOUND.read_text() if arguments.found else arguments.line
            programs = [stored(line) for line in (sys.stdin.read() if lines == "-" else lines).splitlines()]
        for program in programs:
            if not arguments.found:
                print(describe(program))
            plain, log = run_plain(program)
            trial = try_program(program, plain, frozenset(log.features), on)
            print(trial.seed, trial.verdict, trial.why, sep=": ")
            good = good and trial.verdict in ("exact", "refused")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
