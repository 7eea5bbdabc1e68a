"""Timelines: what every rank did when. ``smp.trace`` records them; files, figures and pictures are the core's."""

from shardwright._core import Timeline
from shardwright.timeline.profile import profile
from shardwright.timeline.trace import TraceRecorder, TraceSources, trace

__all__ = ["Timeline", "TraceRecorder", "TraceSources", "profile", "trace"]
