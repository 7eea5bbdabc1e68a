"""Hangs in two threads of the step, in a rank that has threads too, and in a process that is none of Python."""

import subprocess
import threading

from tools.gpu_day.options import Options
from tools.gpu_day.ranks import run_ranks


def wait_for_good() -> None:
    threading.Event().wait()


def rank(options: Options) -> dict[str, object]:
    threading.Thread(target=wait_for_good, name="in a rank", daemon=True).start()
    threading.Event().wait()
    return {}


def run(options: Options) -> dict[str, object]:
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    threading.Thread(target=wait_for_good, daemon=True).start()
    run_ranks(rank, options, seconds=600)
    return {"passed": True}
