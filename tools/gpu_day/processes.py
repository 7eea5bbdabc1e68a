"""Processes of steps: forked from one that has imported torch where that is safe, and ended with all they started."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

#: Set where forks cannot use the device: every process starts afresh then.
FRESH = "SHARDWRIGHT_GPU_DAY_FRESH"
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


def adopt_orphans() -> None:
    """Become the parent of all that children leave behind, so that :func:`descendants` finds everything."""
    if ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def can_fork() -> bool:
    """Whether a fork of this process can do what a fresh one can: it has no other threads, and no device."""
    if os.environ.get(FRESH) or len(os.listdir("/proc/self/task")) > 1:
        return False
    torch: Any = sys.modules.get("torch")
    return torch is None or not (torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork())


def start(
    run: Callable[[], int], module: Sequence[str], environment: Mapping[str, str], out: Path, err: Path, session: bool
) -> int:
    """Start a process: a fork of this one if that is safe, else a fresh one that does the same.

    Args:
        run: What the fork does; the exit code.
        module: The module that a fresh process runs instead, and its arguments.
        environment: The variables that it has besides those of this process.
        out: The file to which its standard output is appended.
        err: The same for standard error.
        session: Whether it leads a session, and with that a process group, of its own.

    Returns:
        The process id.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if can_fork():
        pid = os.fork()
        if pid == 0:
            _child(run, environment, out, err, session)
        return pid
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    actions: list[Any] = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(out), flags, 0o644),
        (os.POSIX_SPAWN_OPEN, 2, str(err), flags, 0o644),
    ]
    command = [sys.executable, "-m", *module]
    return os.posix_spawn(sys.executable, command, {**os.environ, **environment}, file_actions=actions, setsid=session)


def _child(run: Callable[[], int], environment: Mapping[str, str], out: Path, err: Path, session: bool) -> None:
    """Be the child; never returns."""
    code = 70
    try:
        if session:
            os.setsid()
        os.environ.update(environment)
        for number, path in enumerate((Path(os.devnull), out, err)):
            opened = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(opened, number)
            os.close(opened)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        code = run()
        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter's own end does
        atexit._run_exitfuncs()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def poll(pid: int) -> int | None:
    """The exit code of a child, negative for a signal; None while it runs."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def descendants() -> list[int]:
    """The living processes that this one started, and all that those started: parents before their children."""
    children: dict[int, list[int]] = {}
    for pid, fields in _stats():
        if fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(pid)
    found = [os.getpid()]
    for pid in found:
        found += sorted(children.get(pid, []))
    return found[1:]


def end_descendants(seconds: float) -> int:
    """Kill all descendants; how many there were when it began."""
    deadline = time.monotonic() + seconds
    first = len(descendants())
    while (left := descendants()) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap()
        time.sleep(0.01)
    reap()
    return first


def reap() -> None:
    """Take the exit codes of all children that have ended, orphans that came to this process included."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _stats() -> Iterator[tuple[int, list[str]]]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):  # it has ended
                yield int(entry), Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()


def command_of(pid: int) -> str:
    """The command line of a process; of a fork, that of the process from which it was forked."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return "it has ended"


def catches(pid: int, number: int) -> bool:
    """Whether a process handles a signal, which would end it otherwise."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def threads_of(pid: int) -> str:
    """A line for each thread of a process: its name, its state, and what it waits for in the kernel."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        with suppress(OSError):  # it has ended
            name, state = (task / "comm").read_text().strip(), (task / "stat").read_text().rpartition(")")[2].split()[0]
            lines.append(f"thread {task.name} {name}: {state}, {(task / 'wchan').read_text() or '-'}\n")
    return "".join(lines)
