"""Jobs in which transformers takes its path for the original library, started as users start them.

A forked rank would not do: what it is forked from has imported transformers without that path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.jobs.job import torchrun_environment
from tests.jobs.patience import HANG_SECONDS
from tests.jobs.ports import next_port
from tests.jobs.ranks import Ended

ROOT = Path(__file__).resolve().parents[2]


def ended_ranks(*command: str, parameters: Mapping[str, Any], ranks: int) -> list[Ended]:
    """Run ``python -m`` as the ranks of a job to their end, with what the launcher of the original library sets.

    Args:
        command: The module and its arguments.
        parameters: The configuration, with ``partitions``.
        ranks: How many processes run it.
    """
    port, path = next_port(), [str(ROOT / "python"), str(ROOT / "compat"), str(ROOT)]
    base = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "SM_HP_MP_PARAMETERS": json.dumps(dict(parameters)),
        "SM_FRAMEWORK_PARAMS": json.dumps({"sagemaker_mpi_enabled": True}),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", *command],
            env={**base, **torchrun_environment(rank, ranks, port)},
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        with ThreadPoolExecutor(len(processes)) as readers:
            written = list(readers.map(lambda process: process.communicate(timeout=HANG_SECONDS), processes))
    finally:
        for process in processes:
            process.kill()
    return [Ended(process.returncode, *each) for process, each in zip(processes, written, strict=True)]


def outputs_of(*command: str, parameters: Mapping[str, Any], ranks: int) -> list[str]:
    """What each rank wrote to standard output; a rank that fails fails the test with what it said."""
    ended = ended_ranks(*command, parameters=parameters, ranks=ranks)
    failed = [f"rank {rank} ended with {one.code}:\n{one.err[-4000:]}" for rank, one in enumerate(ended) if one.code]
    assert not failed, "\n".join(failed)
    return [one.out for one in ended]
