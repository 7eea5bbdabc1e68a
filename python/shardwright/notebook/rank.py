"""What a forked rank does: its function, and to say what came of it."""

from __future__ import annotations

import builtins
import contextlib
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch

from shardwright import _core
from shardwright.errors import RemoteError, ShardwrightError, UnsupportedValueError
from shardwright.failure_text import FailureText
from shardwright.job.runtime import find_runtime
from shardwright.start import shutdown


class Pipes(NamedTuple):
    """The ends of a rank's pipes, in the rank or in the notebook."""

    out: int
    err: int
    outcome: int


class Failure(NamedTuple):
    """The error that ended a rank, as text.

    Attributes:
        host: The rank's host.
        text: The error.
        follows: Whether it only tells of another rank's failure.
    """

    host: str
    text: FailureText
    follows: bool


def run_rank(notebook: int, environment: Mapping[str, str], pipes: Pipes, function: Callable[[], Any]) -> NoReturn:
    """Run the function, write its pickled result or :class:`Failure` to the pipe, and end this process.

    It ends with the notebook's process too, however that one ends, and takes along what it has started.
    """
    status = 1
    try:
        os.setpgid(0, 0)
        _core.end_with(notebook)
        _take_streams(pipes)
        outcome = _outcome(environment, function)
        with open(pipes.outcome, "wb") as file:
            file.write(outcome)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        status = 0
    finally:
        os._exit(status)  # what the notebook has for its own end is not this process's to do


def _take_streams(pipes: Pipes) -> None:
    """Let the standard streams be pipes to the notebook; a terminal is the notebook's to read."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    if nothing:  # else it is the standard input already
        os.dup2(nothing, 0)
        os.close(nothing)
    for pipe, standard in ((pipes.out, 1), (pipes.err, 2)):
        os.dup2(pipe, standard)
        os.close(pipe)
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115


def _become(environment: Mapping[str, str]) -> None:
    """Take what a launched process has: environment, signals, threads of its own."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(environment)
    # A fork cannot display in the notebook: what asks for it, as rich does, writes text instead.
    builtins.__dict__.pop("get_ipython", None)
    # The threads of a pool that the notebook has used are not in this process, which would wait for them for ever.
    torch.set_num_threads(1)
    _check_gradients()


def _check_gradients() -> None:
    """Raise where torch cannot compute gradients, because the notebook's process has started threads for devices."""
    try:
        with torch.enable_grad():
            torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ShardwrightError(
            "ranks cannot be forked from this process, since torch has started threads for gradients in it, which it "
            "does in the first backward after a compilation, or beside GPUs: restart the notebook's kernel, and call "
            "launch before any other backward"
        ) from error


def _outcome(environment: Mapping[str, str], function: Callable[[], Any]) -> bytes:
    try:
        _become(environment)
        result = function()
        shutdown()
        return _pickled(result)
    except BaseException as error:
        text = FailureText.of(error)
        if (runtime := find_runtime()) is not None:
            runtime.script_error = text._asdict()
            with contextlib.suppress(ShardwrightError):
                shutdown()
        return pickle.dumps((None, Failure(socket.gethostname(), text, isinstance(error, RemoteError))))


def _pickled(result: Any) -> bytes:
    try:
        return pickle.dumps((result, None))
    except Exception as error:
        raise UnsupportedValueError(
            f"the function returned a {type(result).__qualname__} that cannot be pickled ({error}); return numbers, "
            "tensors, or a state dict"
        ) from error
