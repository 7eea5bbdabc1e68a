"""The schedule of steps, and its choice from measurements of the first steps (``pipeline="auto"``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardwright import _core, logs
from shardwright.errors import ConfigError
from shardwright.job.objects import receive_in_step, send_in_step
from shardwright.job.runtime import Runtime

_CHANNEL = "schedule"


class StepTimes(NamedTuple):
    """What a rank did in one step.

    Attributes:
        step: The step.
        forward_ns: Nanoseconds of forward work.
        backward_ns: Nanoseconds of backward work.
        seconds: From the beginning of the step's tasks to their end, and the commit.
        visits: How many forward requests it served.
    """

    step: int
    forward_ns: int
    backward_ns: int
    seconds: float
    visits: int


@dataclass(frozen=True)
class ScheduleDecision:
    """A chosen schedule, with the reason.

    Attributes:
        schedule: Its text form.
        step: The first step that runs with it.
        measured_steps: The steps that were measured, under the schedule before.
        measured_seconds: How long those took on average, on the root.
        simulated_seconds: By candidate, how long a step's tasks would take.
    """

    schedule: str
    step: int
    measured_steps: list[int]
    measured_seconds: float
    simulated_seconds: dict[str, float] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dict for :func:`shardwright.stats`."""
        return dict(vars(self))


def decide(
    step: int, ranks: list[list[StepTimes]], *, microbatches: int, active_microbatches: int
) -> ScheduleDecision | None:
    """Choose a schedule from the measurements of all ranks of the pipeline; None while they are insufficient.

    `ranks` has each rank's times, the root's first. A step counts if all ranks have it and one ran backward.
    """
    chosen = _core.choose_schedule(ranks, microbatches=microbatches, active_microbatches=active_microbatches)
    if chosen is None:
        return None
    schedule, measured_steps, measured_seconds, simulated_seconds = chosen
    return ScheduleDecision(schedule, step, measured_steps, measured_seconds, dict(simulated_seconds))


class Scheduling:
    """The schedule of the steps on a rank.

    Attributes:
        text: Its text form.
        is_program: Whether every rank follows a list of its own.
        splits_backward: Whether it runs backwards in two parts.
        decision: The choice that ``"auto"`` has made, if it has.
    """

    def __init__(self, cfg: Any, pp_size: int) -> None:
        """Start with what the configuration asks for."""
        self.cfg = cfg
        self.decision: ScheduleDecision | None = None
        self._on_trial = cfg.pipeline == "auto" and pp_size > 1
        self._own: list[StepTimes] = []
        self._counted = 0
        self._set(cfg.schedule())

    def _set(self, text: str) -> None:
        self.text = text
        self.is_program = text.startswith("shardwright program")
        self.splits_backward = _core.splits_backward(text)

    def check(self, function: str, num_microbatches: int) -> None:
        """Raise if the schedule does not support this number of microbatches."""
        if num_microbatches != self.cfg.microbatches and (self.is_program or self.text.startswith("list")):
            kind = "a program" if self.is_program else "a list"
            raise ConfigError(
                f'smp.step: {function} has microbatches={num_microbatches}, but "pipeline" is {kind} for steps of '
                f"{self.cfg.microbatches}; give the schedule by name, or leave the argument out"
            )

    def begin_step(self, runtime: Runtime) -> None:
        """Before a step, until a schedule is chosen: send measurements to the root, which sends the choice.

        All of them do so before any runs a task of the step, so that they switch at the same one.
        """
        if not self._on_trial:
            return
        root, *peers = runtime.place.pp_ranks
        if runtime.place.is_root:
            ranks = [self._own, *(receive_in_step(runtime, rank, _CHANNEL) for rank in peers)]
            decision = decide(
                runtime.step.number,
                ranks,
                microbatches=self.cfg.microbatches,
                active_microbatches=self.cfg.active_microbatches,
            )
            for rank in peers:
                send_in_step(runtime, rank, _CHANNEL, decision)
        else:
            send_in_step(runtime, root, _CHANNEL, self._own)
            decision = receive_in_step(runtime, root, _CHANNEL)
        if decision is not None:
            self.decision = decision
            self._on_trial = False
            self._own = []
            self._set(decision.schedule)
            if runtime.place.is_root:
                logs.logger.info("%s", _announcement(runtime, decision))

    def end_step(self, runtime: Runtime) -> None:
        """Record the measurements of a successful step."""
        if not self._on_trial or runtime.step.num_microbatches != self.cfg.microbatches:
            return
        total, newest = (usage.figures() for usage in runtime.usage())
        if total["steps"] == self._counted:  # it divided a model
            return
        self._counted = total["steps"]
        times = StepTimes(
            runtime.step.number,
            round(newest["forward_seconds"] * 1e9),
            round((newest["backward_seconds"] + newest["weight_seconds"]) * 1e9),
            newest["seconds"],
            runtime.server.stats()["step"]["served"]["forward"],
        )
        self._own.append(times)


def _announcement(runtime: Runtime, decision: ScheduleDecision) -> str:
    first = runtime.place.cfg.schedule()
    simulated = decision.simulated_seconds
    return (
        f"rank {runtime.place.rank}: from step {decision.step} on the schedule is {decision.schedule}: simulated from "
        f"steps {decision.measured_steps}, a step's tasks take {1e3 * simulated[decision.schedule]:.1f} ms under it "
        f"and {1e3 * simulated.get(first, max(simulated.values())):.1f} ms under {first}"
    )
