"""Errors that memory ran out: what filled the rank, and what would need less."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from shardwright.failure_text import add_note
from shardwright.memory.account import MemoryAccount
from shardwright.memory.table import account_text

if TYPE_CHECKING:
    from shardwright.job.runtime import Runtime

#: What allocators of host memory say in a plain RuntimeError; the last two are said where a thread finds no room.
_SIGNS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "std::bad_alloc",
    "Resource temporarily unavailable",
    "can't start new thread",
)


class OutOfMemory:
    """Adds the account of a rank to errors that memory ran out."""

    def __init__(self, runtime: Runtime) -> None:
        """Explain the errors of a rank."""
        self._runtime = runtime
        self._explained: BaseException | None = None

    def explain(self, error: BaseException) -> None:
        """Add what fills the rank to an error, if it says that memory ran out; never raises.

        Args:
            error: The error; one that has been explained gets no second note.
        """
        with contextlib.suppress(BaseException):  # there may be no memory to explain it with
            if error is self._explained or not is_out_of_memory(error):
                return
            self._explained = error
            add_note(error, account_text(self._runtime[MemoryAccount].of_rank()))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out.

    Args:
        error: The error.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return type(error) is RuntimeError and any(sign in str(error) for sign in _SIGNS)
