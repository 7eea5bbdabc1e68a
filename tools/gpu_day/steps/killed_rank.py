"""A rank is killed whose memory the other has open: the other says so soon, uses its device, and ends by itself."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from tools.gpu_day.options import Options
from tools.gpu_day.ranks import run_ranks
from tools.gpu_day.small import EXACT, Divided, actions

#: How soon the other has to say so.
SECONDS = 20.0


def ranks(options: Options) -> dict[str, Any]:
    """One of two ranks; rank 1 is killed in its fourth step, in the middle of it."""
    divided = Divided(options.device, 64 if options.tiny else 2048)
    found: dict[str, Any] = {"difference": max(divided.exact_step() for _ in range(3))}
    if os.environ["RANK"] == "1":
        actions["second"] = lambda inputs: os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        divided.train(divided.model, divided.draw())
        found["error"] = "none"
    except Exception as error:
        found |= {"error": type(error).__name__, "text": str(error)[:600], "names_it": "rank 1" in str(error)}
    found["seconds"] = time.monotonic() - began
    found["device_works"] = float(torch.ones(1 << 20, device=options.device).sum()) == float(1 << 20)
    return found


def run(options: Options) -> dict[str, Any]:
    """Kill; it passes if rank 0 named it in time and ended by itself."""
    first, second = run_ranks(ranks, options, seconds=30, grace=25)
    if first.result is None or first.code:
        return {"passed": False, "error": f"rank 0 ended with {first.code}: {first.said()}", "killed": second.code}
    found = dict(first.result)
    passed = second.code == -signal.SIGKILL and found["error"] == "PeerLostError" and found["names_it"]
    passed = passed and found["device_works"] and found["seconds"] <= SECONDS and found["difference"] <= EXACT
    return {"passed": bool(passed), "bars": {"seconds": SECONDS}, "killed": second.code, **found}
