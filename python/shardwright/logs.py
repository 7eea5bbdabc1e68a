"""Warnings of the core's threads, handed to the logger ``shardwright``."""

from __future__ import annotations

import functools
import logging

from shardwright import _core

logger = logging.getLogger("shardwright")


def forward() -> None:
    """Log what the core's threads had to say since the last call."""
    for level, text in _core.take_log():
        logger.log(level, "%s", text)


@functools.cache
def warn_once(text: str) -> None:
    """Warn of what holds for the process as a whole, the first time only."""
    logger.warning("%s", text)
