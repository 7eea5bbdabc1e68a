"""Forwarding log messages of the core's threads to the logger ``shardwright``."""

from __future__ import annotations

import logging

from shardwright import _core

logger = logging.getLogger("shardwright")


def forward() -> None:
    """Log the messages of the core's threads since the last call."""
    for level, text in _core.take_log():
        logger.log(level, "%s", text)
