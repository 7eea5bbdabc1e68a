"""Gathers the times of all ranks once, and lets rank 0 say what they come to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.errors import ShardwrightError
from shardwright.job.objects import receive_from_others, send_on
from shardwright.speed.figures import Division, RankTime, speed_line

if TYPE_CHECKING:
    from shardwright.job.runtime import Runtime

_CHANNEL = "speed"
#: The first step with a divided model warms up; so many after it are measured.
_WARM_STEPS, _MEASURED_STEPS = 1, 5
#: For how long rank 0 waits for the other ranks' times, which they sent before the step that has just ended.
_SECONDS = 1.0


class SpeedAnnouncement:
    """Says once, on rank 0 of a job with a pipeline, how long steps take and what one rank alone would take.

    Ranks send their times before the step after the measured ones, and rank 0 says the line when it has succeeded.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Announce nothing yet."""
        self._runtime = runtime
        self._before: RankTime | None = None
        self._own: RankTime | None = None
        self._is_over = runtime.place.pp_size == 1

    def begin_step(self) -> None:
        """Send this rank's times, once the steps are measured."""
        if self._is_over or self._own is not None:
            return
        now = RankTime.of(self._runtime.usage()[0].figures())
        if self._before is None and now.steps >= _WARM_STEPS:
            self._before = now
        elif self._before is not None and now.steps >= self._before.steps + _MEASURED_STEPS:
            self._own = now.since(self._before)
            if self._runtime.place.rank != 0:
                send_on(self._runtime, 0, _CHANNEL, tuple(self._own))
                self._is_over = True

    def end_step(self) -> None:
        """Say the line on rank 0, unless a rank is gone by then."""
        if self._is_over or self._own is None:
            return
        self._is_over = True
        runtime = self._runtime
        try:
            others = [RankTime(*one) for one in receive_from_others(runtime, _CHANNEL, _SECONDS)]
        except (ShardwrightError, TimeoutError) as error:
            runtime.logger.info("the speed of steps is not said: %s", error)
            return
        place = runtime.place
        division = Division(place.pp_size, place.cfg.tensor_parallel_degree, place.cfg.microbatches)
        runtime.progress.say(speed_line([self._own, *others], division))
