"""A collective in progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Pending(Generic[T]):
    """A collective that runs while its caller computes; it keeps the tensors that it uses until it has ended."""

    def __init__(self, finish: Callable[[], T]) -> None:
        """Create it from a function that waits for the collective and returns its result."""
        self._finish = finish

    def result(self) -> T:
        """Wait for the collective and return its result; call this once."""
        return self._finish()
