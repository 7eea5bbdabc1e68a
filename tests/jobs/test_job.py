"""What a process of a test has written is read to its end, however its readers are scheduled."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from tests.jobs.job import Process

_PROGRAM = "import sys; print('to out'); print('to err', file=sys.stderr)"


def test_a_stream_that_ends_before_the_other_is_read_ends_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def start_and_end(thread: threading.Thread) -> None:
        """As where whoever starts readers waits so long for a core."""
        start(thread)
        thread.join()

    program = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    monkeypatch.setattr(threading.Thread, "start", start_and_end)
    process = Process(program)
    monkeypatch.undo()
    process.drained(1.0)
    assert (process.out, process.err, process.wait(1.0)) == ("to out\n", "to err\n", 0)
