"""The ``shardwright`` command, also available as ``python -m shardwright``."""

from __future__ import annotations

import contextlib
import json
import platform
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwright import _core
from shardwright.communication import ucx_packages
from shardwright.launcher import command as launcher


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with the given arguments, by default those of this process.

    Returns the exit status: 0 for success, 1 for a finding, 2 for a misuse; of ``run``, that of the script.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["run"]:
        return launcher.main(given[1:])
    if given[:2] == ["help", "run"]:
        return launcher.main(["--help"])
    with _ended_by_interrupts():
        status, output, complaint = _core.command(given, json.dumps(_facts()), ucx_packages())
    sys.stdout.write(output)
    sys.stderr.write(complaint)
    return status


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
