"""Runs example scripts as a user does, and reads what they report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.jobs.ranks import outputs_of_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_script(script: Path, *arguments: str, ranks: int = 0, folder: Path, **environment: str) -> dict[str, Any]:
    """Run a script and return the JSON object on the last line of its output, rank 0's.

    Args:
        script: The script.
        arguments: Its arguments.
        ranks: How many processes run it; 0 for one that no launcher started.
        folder: Where it runs.
        environment: Further variables.
    """
    first, *_ = outputs_of_ranks(script, *arguments, ranks=ranks, folder=folder, environment=environment)
    report = json.loads(first.splitlines()[-1])
    assert isinstance(report, dict)
    return report
