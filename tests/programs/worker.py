"""Tries programs as they are asked for: a seed on each line of standard input, a trial as JSON on each of output."""

from __future__ import annotations

import dataclasses
import json
import os
import sys

import torch

from tests.programs.trials import draw_program, jobs, try_program


def main(processes: float) -> None:
    """Answer until the input ends."""
    torch.set_num_threads(1)
    # What the library and torch print is no answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with jobs() as on:
        for line in sys.stdin:
            trial = try_program(*draw_program(int(line), True, processes), on)
            print(
                json.dumps({**dataclasses.asdict(trial), "features": sorted(trial.features)}), file=answers, flush=True
            )


if __name__ == "__main__":
    main(float(sys.argv[1]))
