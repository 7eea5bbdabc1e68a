"""Tries to join the job again and again, each time as told: a JSON list in ``ATTEMPTS``."""

from __future__ import annotations

import json
import os
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import common
import shardwright as smp
from common import await_word, say
from shardwright import _core
from shardwright.stalls.reporter import StallReporter

VERSION = _core.__version__


def threads(may_start: bool) -> AbstractContextManager[Any]:
    """Whether the system lets this rank start the thread that it has of its own."""
    if may_start:
        return nullcontext()
    return patch.object(StallReporter, "start", side_effect=RuntimeError("can't start new thread"))


def main() -> None:
    for attempt in json.loads(os.environ["ATTEMPTS"]):
        say("ready", name=attempt["name"])
        await_word()
        os.environ.update(attempt.get("environment", {}))
        for name in attempt.get("without", []):
            os.environ.pop(name, None)
        _core.__version__ = attempt.get("version", VERSION)
        began = time.monotonic()
        failure = None
        try:
            with threads(attempt.get("threads", True)):
                smp.init({"pipeline_parallel_degree": int(os.environ["WORLD_SIZE"]), **attempt.get("keys", {})})
        except Exception as error:
            failure = common.describe(error)
        say("tried", name=attempt["name"], failure=failure, seconds=time.monotonic() - began)
        smp.shutdown()


if __name__ == "__main__":
    main()
