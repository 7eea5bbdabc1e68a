"""One rank of a program, as a process: ``python -m tests.programs.rank PROGRAM.json`` with what a launcher sets.

A further argument is the number of the job, where one resumes another.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import shardwright as smp
import torch
from shardwright.execution.frame_table import FrameTable
from shardwright.job.runtime import current_runtime

from tests.programs.log import Log, log_of_run
from tests.programs.program import Program
from tests.programs.running import run_on_rank

#: What divides parameters; nothing is clipped.
LAYOUTS: dict[str, dict[str, Any]] = {
    "": {},
    "tensor": {"tensor_parallel_degree": 2},
    "sharded_data": {
        "sharded_data_parallel_degree": 2,
        "sdp_param_persistence_threshold": 10,
        "sdp_gradient_clipping": 1e9,
    },
}


def main(given: Path, leg: int) -> None:
    """Run the program, and leave the outcome beside it."""
    warnings.simplefilter("ignore")
    logging.getLogger("shardwright").setLevel(logging.ERROR)
    program = Program(**json.loads(given.read_text()))
    # The first and second stall reports of a step that cannot go on come after seconds.
    limits = {"stall_report_seconds": 10, "stall_timeout_seconds": 30}
    replicas = {"ddp": program.replicas > 1, "shard_optimizer_state": program.sharded, **LAYOUTS[program.layout]}
    smp.init({"pipeline_parallel_degree": program.ranks, **replicas, **program.settings(), **limits})
    runtime = current_runtime()
    file = given.with_name(f"rank{runtime.place.rank}.{leg}.pt")
    log = log_of_run[0] = Log(plain=False)
    try:
        left = run_on_rank(program, runtime, folder=given.parent, leg=leg)
        left.add_log(log)
        assert not len(runtime[FrameTable]), "frames are left"
        assert not runtime[FrameTable].unclosed, "frames are left"
    except Exception as error:
        kind = error.kind if isinstance(error, smp.RemoteError) else type(error).__name__
        text = {"type": type(error).__name__, "kind": kind, "text": str(error), "traceback": traceback.format_exc()}
        torch.save(text, file)
        return
    torch.save(left, file)
    smp.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
