"""The schedule of steps, and its choice from measurements of the first steps."""

from __future__ import annotations

from collections.abc import Callable
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
        weight_ns: Nanoseconds of weight gradients that were computed apart from their backward.
    """

    step: int
    forward_ns: int
    backward_ns: int
    seconds: float
    visits: int
    weight_ns: int = 0


class RankMemory(NamedTuple):
    """What microbatches in flight keep on a rank.

    Attributes:
        microbatch_bytes: What each of them keeps; 0 if that is not known.
        free_bytes: What all of them may keep, if that is limited.
    """

    microbatch_bytes: int
    free_bytes: int | None


@dataclass(frozen=True)
class ScheduleDecision:
    """A chosen schedule, with the reason.

    Attributes:
        schedule: Its text form.
        step: The first step that runs with it.
        measured_steps: The steps that were measured, under the schedule before.
        measured_seconds: How long those took on average, on the root.
        simulated_seconds: By candidate, how long a step's tasks would take.
        splits: By rank of the pipeline, of how many of the last microbatches it runs the backward in two parts. None if
            that is not chosen.
        in_flight: By rank of the pipeline, the most microbatches in flight, as simulated. None if that is not chosen.
        fits: Whether all ranks stay within ``memory_limit_bytes``.
        message_seconds: How long a message takes in the simulations, so that they explain the measured steps.
    """

    schedule: str
    step: int
    measured_steps: list[int]
    measured_seconds: float
    simulated_seconds: dict[str, float] = field(repr=False)
    splits: list[int] | None = None
    in_flight: list[int] | None = None
    fits: bool = True
    message_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dict for :func:`shardwright.stats`."""
        return dict(vars(self))


def decide(
    step: int, ranks: list[list[StepTimes]], *, microbatches: int, active_microbatches: int, control: str
) -> ScheduleDecision | None:
    """Choose a schedule from the measurements of all ranks of the pipeline; None while they are insufficient.

    `ranks` has each rank's times, the root's first. A step counts if all ranks have it and one ran backward.
    `control` is "predicted" if calls of later steps do not wait for results, else "star".
    """
    times = [[(t.step, t.forward_ns, t.backward_ns + t.weight_ns, t.seconds, t.visits) for t in own] for own in ranks]
    chosen = _core.choose_schedule(
        times, microbatches=microbatches, active_microbatches=active_microbatches, control=control
    )
    if chosen is None:
        return None
    schedule, measured_steps, measured_seconds, simulated_seconds = chosen
    return ScheduleDecision(schedule, step, measured_steps, measured_seconds, dict(simulated_seconds))


#: Steps of a trial in which all backwards are split; the next one splits none.
_SPLIT_STEPS = 2


def tune(
    step: int,
    ranks: list[list[StepTimes]],
    memory: list[RankMemory],
    *,
    microbatches: int,
    active_microbatches: int,
    may_split: bool,
    control: str,
) -> tuple[int, ScheduleDecision | None]:
    """Choose how many microbatches are in flight, and which backwards are split, from the measurements of all ranks.

    Args:
        step: The first step that runs with the choice.
        ranks: Each rank's times, the root's first. A step counts if all ranks have it and one ran backward.
        memory: What microbatches keep on each rank.
        microbatches: How many microbatches a step has.
        active_microbatches: The most that may be in flight.
        may_split: Whether backwards may be split.
        control: "predicted" if calls of later steps do not wait for results, else "star".

    Returns:
        How many steps count so far, and the choice; None while they are insufficient.
    """
    loads = [
        [(t.step, round(t.seconds * 1e9), t.forward_ns, t.backward_ns, t.weight_ns, t.visits) for t in own]
        for own in ranks
    ]
    number, tuned = _core.tune_schedule(
        loads,
        memory,
        microbatches=microbatches,
        active_microbatches=active_microbatches,
        may_split=may_split,
        control=control,
    )
    if tuned is None:
        return number, None
    measured_steps, message_seconds, (schedule, splits, seconds, in_flight, fits), whole, all_split = tuned
    simulated = {f"{whole[0]} without splits": whole[2], schedule: seconds}
    if all_split is not None:
        simulated[f"{all_split[0]} with all backwards split"] = all_split[2]
    measured = [t.seconds for t in ranks[0] if t.step in measured_steps]
    mean = sum(measured) / len(measured)
    return number, ScheduleDecision(
        schedule, step, measured_steps, mean, simulated, splits, in_flight, fits, message_seconds
    )


class Scheduling:
    """The schedule of the steps on a rank.

    Attributes:
        text: Its text form.
        is_program: Whether every rank follows a list of its own.
        decision: The choice from measurements, if one has been made.
    """

    def __init__(self, cfg: Any, pp_rank: int, pp_size: int) -> None:
        """Start with what the configuration asks for."""
        self.cfg = cfg
        self.decision: ScheduleDecision | None = None
        self._pp_rank = pp_rank
        self._may_split = cfg.pipeline == "zero_bubble"
        self._on_trial = (cfg.pipeline == "auto" or cfg.chooses_active_microbatches()) and pp_size > 1
        #: Of how many of the last microbatches the backward is split here; None for all.
        self._splits: int | None = None
        self._own: list[StepTimes] = []
        self._counted = 0
        self._set(cfg.schedule())

    def _set(self, text: str) -> None:
        self.text = text
        self.is_program = text.startswith("shardwright program")
        self._splits_backward = _core.splits_backward(text)

    def splits(self, microbatch: int, num_microbatches: int) -> bool:
        """Return whether the backward of a microbatch runs in two parts on this rank."""
        is_last = self._splits is None or microbatch + self._splits >= num_microbatches
        return self._splits_backward and is_last

    def check(self, function: str, num_microbatches: int) -> None:
        """Raise if the schedule does not support this number of microbatches."""
        if num_microbatches != self.cfg.microbatches and (self.is_program or self.text.startswith("list")):
            kind = "a program" if self.is_program else "a list"
            raise ConfigError(
                f'smp.step: {function} has microbatches={num_microbatches}, but "pipeline" is {kind} for steps of '
                f"{self.cfg.microbatches}; give the schedule by name, or leave the argument out"
            )

    def begin_step(self, runtime: Runtime, memory: Callable[[], RankMemory]) -> None:
        """Before a step, until a schedule is chosen: send measurements to the root, which sends the choice.

        All of them do so before any runs a task of the step, so that they switch at the same one. ``memory`` returns
        what microbatches keep on this rank.
        """
        if not self._on_trial:
            return
        root, *peers = runtime.place.pp_ranks
        if runtime.place.is_root:
            others = [receive_in_step(runtime, rank, _CHANNEL) for rank in peers]
            # Pipelines of tensor-parallel ranks run their tasks in one order: the first one's measurements decide.
            first, *followers = runtime.place.tp_ranks
            if runtime.place.rank == first:
                answer = self._decide(runtime.step.number, [(self._own, memory()), *others])
            else:
                answer = receive_in_step(runtime, first, _CHANNEL)
                followers = []
            for rank in (*followers, *peers):
                send_in_step(runtime, rank, _CHANNEL, answer)
        else:
            send_in_step(runtime, root, _CHANNEL, (self._own, memory()))
            answer = receive_in_step(runtime, root, _CHANNEL)
        self._splits, decision = answer
        if decision is not None:
            self.decision = decision
            self._on_trial = False
            self._own = []
            self._set(decision.schedule)
            self._splits = None if decision.splits is None else decision.splits[self._pp_rank]
            if runtime.place.is_root:
                logs.logger.info("%s", _announcement(runtime, decision))

    def _decide(
        self, step: int, ranks: list[tuple[list[StepTimes], RankMemory]]
    ) -> tuple[int | None, ScheduleDecision | None]:
        """Return of how many microbatches the backward is split in the next step of a trial, and the choice."""
        times = [own for own, _ in ranks]
        bounds = {
            "microbatches": self.cfg.microbatches,
            "active_microbatches": self.cfg.active_microbatches,
            "control": "predicted" if self.cfg.static_mode else "star",
        }
        if self.cfg.pipeline == "auto":
            return None, decide(step, times, **bounds)
        number, decision = tune(step, times, [memory for _, memory in ranks], may_split=self._may_split, **bounds)
        return (None if number < _SPLIT_STEPS else 0), decision

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
            round(newest["backward_seconds"] * 1e9),
            newest["seconds"],
            runtime.server.stats()["step"]["served"]["forward"],
            round(newest["weight_seconds"] * 1e9),
        )
        self._own.append(times)


def _announcement(runtime: Runtime, decision: ScheduleDecision) -> str:
    simulated, text = decision.simulated_seconds, f"from step {decision.step} on the schedule is {decision.schedule}"
    beginning = f"rank {runtime.place.rank}: {text}"
    if decision.splits is None:
        first = runtime.place.cfg.schedule()
        return (
            f"{beginning}: simulated from steps {decision.measured_steps}, a step's tasks take "
            f"{1e3 * simulated[decision.schedule]:.1f} ms under it "
            f"and {1e3 * simulated.get(first, max(simulated.values())):.1f} ms under {first}"
        )
    limit = runtime.place.cfg.memory_limit_bytes
    kept = "" if limit is None else f", {'within' if decision.fits else 'NOT within'} memory_limit_bytes {limit}"
    times = ", ".join(f"{1e3 * seconds:.1f} ms under {name}" for name, seconds in simulated.items())
    return (
        f"{beginning}; by rank, the backward is in two parts for the last {decision.splits} of "
        f"{runtime.place.cfg.microbatches} microbatches, and at most {decision.in_flight} are in flight{kept}: "
        f"simulated from steps {decision.measured_steps}, with {1e3 * decision.message_seconds:.1f} ms for a message, "
        f"a step's tasks take {times}"
    )
