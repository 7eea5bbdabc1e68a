"""Runs at the start of every Python process of a step that is started afresh: it can be asked for its stacks."""

import faulthandler
import os
import signal

if path := os.environ.get("SHARDWRIGHT_GPU_DAY_STACKS"):
    to = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    faulthandler.register(signal.SIGUSR1, file=to, all_threads=True)
