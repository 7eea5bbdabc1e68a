"""Worker processes that try programs; one that crashes or hangs is replaced, and its program is what did it."""

from __future__ import annotations

import json
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator

from tests.jobs.patience import HANG_SECONDS
from tests.programs.trials import Trial

#: A worker is replaced after so many programs: caches of torch grow with every module that it sees.
PROGRAMS_EACH = 100


class _Worker:
    """A process that tries one program after another."""

    def __init__(self, processes: float) -> None:
        self._tried = 0
        self._command = [sys.executable, "-m", "tests.programs.worker", str(processes)]
        self._process: subprocess.Popen[str] | None = None

    def trial(self, seed: int) -> Trial:
        """Try the program of a seed."""
        if self._process is None:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        print(seed, file=process.stdin, flush=True)
        answer = process.stdout.readline() if select.select([process.stdout], [], [], HANG_SECONDS)[0] else None
        self._tried += 1
        if not answer or self._tried == PROGRAMS_EACH:
            self.end(at_once=answer is None)
        if answer:
            fields = json.loads(answer)
            return Trial(**fields | {"features": frozenset(fields["features"]), "crossed": tuple(fields["crossed"])})
        verdict, why = ("hung", f"no answer in {HANG_SECONDS:.0f} seconds") if answer is None else ("crashed", "")
        if verdict == "crashed":
            code = process.returncode
            why = f"the process ended with {signal.Signals(-code).name if code < 0 else code}"
        return Trial(str(seed), verdict, why, frozenset(), (False, False))

    def end(self, at_once: bool = False) -> None:
        """End the process."""
        process, self._process, self._tried = self._process, None, 0
        if process is None:
            return
        assert process.stdin is not None
        if at_once:
            process.kill()
        try:
            process.stdin.close()
            process.wait(30.0)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            process.kill()
            process.wait()


def try_with_workers(seeds: Iterable[int], number: int, processes: float) -> Iterator[Trial]:
    """Try the programs of some seeds, as many at once as there are workers; trials come as they end."""
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    for seed in seeds:
        left.put(seed)
    count, done = left.qsize(), queue.SimpleQueue[Trial | BaseException]()

    def work() -> None:
        worker = _Worker(processes)
        try:
            while True:
                done.put(worker.trial(left.get_nowait()))
        except queue.Empty:
            pass
        except BaseException as error:
            done.put(error)
        finally:
            worker.end()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(number)]
    for thread in threads:
        thread.start()
    for _ in range(count):
        trial = done.get()
        if isinstance(trial, BaseException):
            raise trial
        yield trial
    for thread in threads:
        thread.join()
