"""Trains, and on one rank something happens: ``training.py SCENARIO [CONFIGURATION]``; nothing is caught."""

from __future__ import annotations

import ctypes
import itertools
import json
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import common
import shardwright as smp
from common import await_word, fault, say

#: Whoever does something special: rank 1 of a job of two, rank 3 of four; rank 0 where it is debugged.
SPECIAL = -1


def block() -> None:
    """Suspend the task until the test says something."""
    say("blocked")
    await_word()


def debug() -> None:
    """Stop in the debugger, until the test tells it to go on."""
    say("blocked")
    breakpoint()
    sys.stdout.write("\n")  # behind the prompt


def hold_the_interpreter() -> None:
    """Compute in C without letting any other Python thread run."""
    ctypes.PyDLL(None).sleep(8)


def let_others_run() -> None:
    """Compute in C while other Python threads run."""
    ctypes.CDLL(None).sleep(5)


def lose_the_data() -> None:
    raise OSError("shard 7 of the data is missing")


def go_on() -> None:
    """Nothing happens."""


class Loop:
    """A training loop of a few steps; subclasses by scenario."""

    steps = 4

    def __init__(self, name: str) -> None:
        self.action, self.place = SCENARIOS[name]

    def run(self, job: common.TrainingJob) -> None:
        special = smp.rank() == (0 if self.action is debug else smp.size() - 1)
        for step in itertools.count() if self.action is go_on else range(self.steps):
            error = job.exact_step()
            say("step", number=step, error=error, strangers=smp.stats()["communication"]["unknown_peers_dropped"])
            if special and step == 1:
                if self.place is None:
                    if self.action():
                        return
                else:
                    name, phase, visit = self.place
                    fault.arm(name, phase, self.action, visit)
        say("done")


#: By name what is done, and in which visit of which module and phase; None: between steps. Before the second visit an
#: earlier microbatch may have got further.
SCENARIOS: dict[str, tuple[Callable[[], Any], tuple[str, str, int] | None]] = {
    "block in first forward": (block, ("second", "forward", 1)),
    "block in first backward": (block, ("second", "backward", 1)),
    "block in forward": (block, ("second", "forward", 2)),
    "block between steps": (block, None),
    "debug in forward": (debug, ("first", "forward", 2)),
    "debug in backward": (debug, ("first", "backward", 2)),
    "debug between steps": (debug, None),
    "leave": (lambda: True, None),
    "exit": (lambda: sys.exit(0), None),
    "exit 3": (lambda: sys.exit(3), None),
    "lose data": (lose_the_data, None),
    "hold": (hold_the_interpreter, ("second", "forward", 2)),
    "compute": (let_others_run, ("second", "forward", 2)),
    "compute between steps": (hold_the_interpreter, None),
    "barrier": (smp.barrier, None),
    "another model": (go_on, None),
    "train": (lambda: None, None),
    "train for ever": (go_on, None),
}


def main() -> None:
    name, *configuration = sys.argv[1:]
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    if name == "another model":
        common.WIDTH += int(os.environ["RANK"])
    job = common.start(**(json.loads(configuration[0]) if configuration else {}))
    Loop(name).run(job)


if __name__ == "__main__":
    main()
