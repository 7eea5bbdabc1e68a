"""Whether a job goes on after a node is lost for good, as it would resharded by hand.

usage: python -m tests.elastic

Four nodes of torchrun with one rank each train ``examples/elastic.py``. In step 30 of 60, one is killed with its agent,
and not replaced. The others have to go on with the configuration that fits them. The losses are compared with those of
jobs without a failure, between which the checkpoint is resharded. A table, and a last line of JSON; the exit code is 1
when a sample was lost or taken twice, or when a loss differs by more than 1e-10.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.elastic.runs import KILLED_IN, STEPS, by_hand, lost_and_repeated, under_torchrun, worst_relative_error

NODES, BAR = 4, 1e-10


def main() -> int:
    """Run, compare, print; the exit code."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory(prefix="shardwright-elastic-") as scratch:
        run = under_torchrun(Path(scratch), NODES, KILLED_IN, "--steps", str(STEPS))
        as_meant = [one["ranks"] for one in run.starts] in ([4, 3], [4, 2]) and run.starts[1]["from_step"] < KILLED_IN
        other = by_hand(Path(scratch), run) if as_meant else None
    table = Table("from step", "ranks", "stages", "replicas", "loss there", "loss there, by hand")
    for start in run.starts:
        at = start["from_step"]
        reference = "" if other is None else f"{other.losses[at]:.15f}"
        degrees = [str(start[key]) for key in ("from_step", "ranks", "stages", "replicas")]
        table.add_row(*degrees, f"{run.losses[at]:.15f}", reference)
    Console().print(table)
    lost, repeated = lost_and_repeated(run, STEPS)
    worst = None if other is None else worst_relative_error(run, other)
    said = {
        "restarts": len(run.starts) - 1,
        "samples_lost": lost,
        "samples_repeated": repeated,
        "worst_rel_error": worst,
    }
    print(json.dumps(said), flush=True)
    good = worst is not None and worst <= BAR and len(run.losses) == STEPS
    return 0 if good and lost == repeated == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
