"""Errors that memory ran out: what filled the rank, and what would need less."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from shardwright.errors import ShardwrightError
from shardwright.failure_text import add_note
from shardwright.memory.account import MemoryAccount
from shardwright.memory.table import account_text

if TYPE_CHECKING:
    from shardwright.job.runtime import Runtime

#: What says in a RuntimeError that memory ran out: allocators of host memory, CUDA (also of pinned memory), the
#: libraries that allocate on a device by themselves, and the last two where a thread finds no room.
_SIGNS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "std::bad_alloc",
    "OUT_OF_MEMORY",
    "STATUS_ALLOC_FAILED",
    "Resource temporarily unavailable",
    "can't start new thread",
)


_EXPLAINED = "_shardwright_explained"


class OutOfMemory:
    """Adds the account of a rank to errors that memory ran out."""

    def __init__(self, runtime: Runtime) -> None:
        """Explain the errors of a rank."""
        self._runtime = runtime

    def explain(self, error: BaseException) -> None:
        """Add what fills the rank to an error, if it says that memory ran out; never raises.

        Args:
            error: The error; one that has been explained gets no second note.
        """
        with contextlib.suppress(BaseException):  # there may be no memory to explain it with
            if hasattr(error, _EXPLAINED) or not is_out_of_memory(error):
                return
            # Noted in the error: whoever kept it would keep the tensors of all functions that it has passed through.
            setattr(error, _EXPLAINED, True)
            add_note(error, account_text(self._runtime[MemoryAccount].of_rank()))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out.

    Args:
        error: The error.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, ShardwrightError) and type(error) is not ShardwrightError:
        return False  # such as another rank's, which has its own account, and a disk's
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)
