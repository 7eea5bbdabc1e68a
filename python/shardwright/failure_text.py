"""Errors as text for other ranks, even if the error's own methods raise."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from shardwright.errors import RemoteError

#: The maximum size of a message, and of a traceback, in bytes of UTF-8.
MAX_BYTES = 1 << 16
#: The bytes kept from the end of a truncated text, where a traceback names the error.
_END_BYTES = MAX_BYTES // 4


class FailureText(NamedTuple):
    """An error as text that can be sent: the name of its class, its message and its traceback."""

    kind: str
    message: str
    traceback: str

    @staticmethod
    def of(error: BaseException) -> FailureText:
        """Describe an error; never raises, even if the error's own methods do."""
        return FailureText(
            _safe_text(lambda: type(error).__qualname__, "name of its class"),
            _safe_text(lambda: error.__str__(), "text"),
            _safe_text(lambda: _traceback(error), "traceback"),
        )


def sendable(text: str) -> str:
    """Escape lone surrogates in a text, and truncate it to :data:`MAX_BYTES`."""
    begin, end = text[: MAX_BYTES + 1], text[-_END_BYTES:]
    encoded = begin.encode("utf-8", "backslashreplace")
    if len(encoded) <= MAX_BYTES:
        return encoded.decode()
    first = encoded[: MAX_BYTES - _END_BYTES].decode(errors="ignore")
    last = end.encode("utf-8", "backslashreplace")[-_END_BYTES:].decode(errors="ignore")
    left_out = max(len(text) - len(first) - len(last), 0)
    return f"{first}\n[... {left_out:,} of {len(text):,} characters are left out here ...]\n{last}"


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error, if it accepts one."""
    with contextlib.suppress(BaseException):
        error.add_note(note)


def report(server: Any, error: BaseException, **place: Any) -> None:
    """Fail the step on every rank, whatever the error does, at a `place` for the server's ``fail``; never raises.

    An error that came from another rank is reported as that rank's failure.
    """
    place = {"module": None, "microbatch": None, "phase": None, **place}
    try:
        fields = place | (_passed_on(error) if isinstance(error, RemoteError) else FailureText.of(error)._asdict())
        if isinstance(fields["module"], str):
            fields["module"] = sendable(fields["module"])
        server.fail(**fields)
    except BaseException:  # no memory, for example
        with contextlib.suppress(BaseException):
            server.fail(**(place | _FALLBACK))


def _passed_on(error: RemoteError) -> dict[str, Any]:
    """The report of an error that came from another rank."""
    known = {"module": error.module, "microbatch": error.microbatch, "phase": error.phase}
    return {
        **{name: value for name, value in known.items() if value is not None},
        **FailureText(*map(sendable, (error.kind, error.message, error.traceback)))._asdict(),
        "origin": (error.rank, sendable(error.host)),
    }


#: Allocated in advance, for use when memory is exhausted.
_FALLBACK = {"module": None, "kind": "Exception", "message": "an error that could not be described", "traceback": ""}


def _safe_text(read: Callable[[], str], what: str) -> str:
    try:
        return sendable(read())
    except BaseException as problem:  # of the error's own methods, which may raise anything
        return f"(the error's {what} is not available: reading it raised {_name(problem)})"


def _name(error: BaseException) -> str:
    try:
        return sendable(type(error).__qualname__)
    except BaseException:
        return "an error"


def _traceback(error: BaseException) -> str:
    """As ``traceback.format_exception``, whose lines may each be longer than all that is told."""
    lines = traceback.TracebackException(type(error), error, error.__traceback__, compact=True).format()
    return "".join(sendable(line) for line in lines)
