"""The ``shardwright`` command, also available as ``python -m shardwright``."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwright import _core, entry
from shardwright.communication import ucx_packages
from shardwright.convert import command as converter
from shardwright.launcher import command as launcher


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with the given arguments, by default those of this process.

    Returns the exit status: 0 for success, 1 for a finding or an output that cannot be written, 2 for a misuse, 130
    after Ctrl-C; of ``run``, that of the script.
    """
    entry.leave_interrupts()
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        status, output = _run(given)
        _write(output)
    except KeyboardInterrupt:
        complain("interrupted")
        return entry.INTERRUPTED
    except OSError as error:
        _give_up_output()
        complain(f"cannot write the output: {error.strerror or error}")
        return 1
    return status


def _run(given: list[str]) -> tuple[int, str]:
    """Return the exit status and what is to be written, after complaints were written."""
    if given[:1] == ["run"]:
        return launcher.main(given[1:]), ""
    if given[:2] == ["help", "run"]:
        return launcher.main(["--help"]), ""
    if given[:1] == ["convert"]:
        return converter.main(given[1:])
    if given[:2] == ["help", "convert"]:
        return converter.main(["--help"])
    with _ended_by_interrupts():
        status, output, complaint = _core.command(given, json.dumps(_facts()), ucx_packages())
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(complaint)
    return status, output


def _write(output: str) -> None:
    """Write all of the output, or raise ``OSError``."""
    if sys.stdout is None:
        if output:
            raise OSError(errno.EBADF, "it is closed")
        return
    try:
        sys.stdout.write(output)
    except UnicodeEncodeError:
        encoding = sys.stdout.encoding
        sys.stdout.write(output.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()


def _give_up_output() -> None:
    """Let what could not be written go nowhere: Python would try again at its end, and complain a second time."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def complain(why: str) -> None:
    """Say in one line what is wrong, where there is somebody to hear it."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            sys.stderr.write(f"shardwright: {why}\n")


@contextlib.contextmanager
def _ended_by_interrupts() -> Iterator[None]:
    """Let Ctrl-C end the process at once: a long copy of files would only see it at its end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _facts() -> dict[str, Any]:
    """Collect facts that only Python knows."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    # torch says by a warning why it cannot use a device that is there, such as a driver that is too old.
    problem = next((str(warning.message).partition("\n")[0] for warning in caught), None)
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "devices": devices,
        "cuda_problem": None if devices else problem,
    }


if __name__ == "__main__":
    sys.exit(main())
