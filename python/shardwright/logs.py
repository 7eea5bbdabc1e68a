"""Warnings of the core's threads, handed to the logger ``shardwright``."""

from __future__ import annotations

import logging

from shardwright import _core

logger = logging.getLogger("shardwright")


def forward() -> None:
    """Log what the core's threads had to say since the last call."""
    for level, text in _core.take_log():
        logger.log(level, "%s", text)
