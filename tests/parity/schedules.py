"""What a case's schedule is in a configuration: a name as it is, or an order of a user's own. Needs no torch."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from .cases import Case

#: For two ranks and four microbatches. The root starts forwards in turn, and backwards out of turn.
LIST: tuple[tuple[int, str], ...] = (
    (0, "forward"), (1, "forward"), (1, "backward"), (2, "forward"), (0, "backward"), (3, "forward"), (3, "backward"),
    (2, "backward"),
)  # fmt: skip
#: The same for programs: torch's compute-only CSV with whole backwards, and our text form with backwards in parts.
CSV = "0F0,0F1,0F2,0B1,0B0,0F3,0B3,0B2\n1F0,1F1,1B1,1F2,1B0,1F3,1B3,1B2\n"
IN_PARTS = (
    "shardwright program 1\n"
    "rank 0: 0F0 0F1 0I0 0F2 0W0 0I1 0F3 0I2 0W2 0W1 0B3\n"
    "rank 1: 1F0 1I0 1F1 1W0 1I1 1F2 1I2 1F3 1I3 1W3 1W2 1W1\n"
)
_FILES = {"program.csv": CSV, "program.txt": IN_PARTS}


def pipeline_of(case: Case) -> Any:
    """The value of the configuration key ``pipeline``; a program is written to a file of this rank's own."""
    if case.schedule == "list":
        return LIST
    if case.schedule not in _FILES:
        return case.schedule
    if (case.pp, case.microbatches) != (2, 4):
        raise ValueError(f"{case.name}: {case.schedule} is for two ranks and four microbatches")
    path = Path(tempfile.mkdtemp(prefix="program-")) / case.schedule
    path.write_text(_FILES[case.schedule])
    return str(path)
