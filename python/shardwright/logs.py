"""Forwarding log messages of the core's threads to the logger ``shardwright``."""

from __future__ import annotations

import functools
import logging

from shardwright import _core

logger = logging.getLogger("shardwright")


def forward() -> None:
    """Log the messages of the core's threads since the last call."""
    for level, text in _core.take_log():
        logger.log(level, "%s", text)


@functools.cache
def warn_once(text: str) -> None:
    """Warn of what holds for the process as a whole, the first time only."""
    logger.warning("%s", text)
