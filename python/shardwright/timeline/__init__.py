"""Timelines: what every rank did when. ``smp.trace`` records them; files, figures and pictures are the core's."""

from shardwright._core import Timeline
from shardwright.timeline.trace import Traced, trace

__all__ = ["Timeline", "Traced", "trace"]
