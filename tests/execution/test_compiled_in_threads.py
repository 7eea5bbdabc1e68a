"""Tasks run in threads that end; what torch.compile leaves behind in them must not be needed later."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.jobs.patience import HANG_SECONDS

SCRIPT = """
import threading
import shardwright as smp
import torch

smp.init(pipeline_parallel_degree=2)

def compile_one():
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))

thread = threading.Thread(target=compile_one)
thread.start()
thread.join()
torch._dynamo.reset()
compile_one()
"""


def test_compiling_in_a_thread_that_has_ended_leaves_torch_whole(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # glibc overwrites what is freed, so that using it again crashes at once.
    environment = {**os.environ, "MALLOC_PERTURB_": "165"}
    command = [sys.executable, "-m", "shardwright", "run", "--ranks", "2", str(script)]
    subprocess.run(command, env=environment, check=True, timeout=HANG_SECONDS)
