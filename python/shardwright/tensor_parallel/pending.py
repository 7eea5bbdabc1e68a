"""A collective under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Pending(Generic[T]):
    """A collective that runs while its caller computes; what it reads and writes is kept until it has ended."""

    def __init__(self, finish: Callable[[], T]) -> None:
        """For what waits for it and makes the result."""
        self._finish = finish

    def result(self) -> T:
        """Wait for it, once, and return what the collective returns."""
        return self._finish()
