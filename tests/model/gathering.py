"""Ranks in one process: what a gather brings is given beforehand."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock


def gathering(module: Any, gather: Callable[[Any], list[Any]]) -> AbstractContextManager[Any]:
    """Let the code of a Python module gather by a function of this rank's value while the block runs."""

    def gather_over(group: Any, value: Any, operation: str, *, to_first: bool = False) -> list[Any]:
        return gather(value)

    return mock.patch.object(module, "gather_over", gather_over)
