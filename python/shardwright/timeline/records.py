"""One record of a timeline, and what a rank's records add up to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NotRequired, TypedDict

Kind = Literal["root", "forward", "backward", "close", "wait", "send", "receive"]
Activity = Literal["forward", "backward", "other", "wait", "transfer"]


class Record(TypedDict):
    """What one rank did over one interval.

    Attributes:
        rank: The global rank.
        step: The step, counted from the start of the job.
        kind: `root` (the step function), `forward`, `backward`, `close` (a frame without backward),
            `wait` (a suspended worker), `send` or `receive` (a message).
        start_ns: When it began, in nanoseconds on a clock that all ranks share.
        end_ns: When it ended.
        phase: Forward or backward, for `root` and for messages.
        worker: The worker, unless no worker did it.
        module: The module's global name.
        microbatch: The microbatch.
        peer: The other rank of a message, or the requester of a task.
        bytes: Bytes of tensors in a message.
    """

    rank: int
    step: int
    kind: Kind
    start_ns: int
    end_ns: int
    phase: NotRequired[Literal["forward", "backward"] | None]
    worker: NotRequired[int | None]
    module: NotRequired[str | None]
    microbatch: NotRequired[int | None]
    peer: NotRequired[int | None]
    bytes: NotRequired[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSummary:
    """How a rank spent the time from the first to the last record of the steps shown.

    Attributes:
        rank: The global rank.
        forward_ns: Time in forward work.
        backward_ns: Time in backward work.
        other_ns: Time in other tasks.
        idle_ns: Time within steps in which no task ran here.
        step_ns: Length of the steps, over all ranks.
        sent_bytes: Bytes of tensors sent.
    """

    rank: int
    forward_ns: int
    backward_ns: int
    other_ns: int
    idle_ns: int
    step_ns: int
    sent_bytes: int


def activity(record: Record) -> Activity:
    """What a record's interval was spent on."""
    match record["kind"]:
        case "send" | "receive":
            return "transfer"
        case "close":
            return "other"
        case "root":
            return record.get("phase") or "forward"
        case kind:
            return kind


def label(record: Record) -> str:
    """A record's name on a picture."""
    kind = record["kind"]
    if kind in ("send", "receive"):
        peer = record.get("peer")
        return kind if peer is None else f"{kind} {'to' if kind == 'send' else 'from'} rank {peer}"
    name = record.get("module") or ("step function" if kind == "root" else kind)
    return f"wait in {name}" if kind == "wait" and name != "wait" else name


def step_intervals(records: Iterable[Record]) -> dict[int, tuple[int, int]]:
    """First start and last end of every step, over all ranks, in order of steps."""
    intervals: dict[int, tuple[int, int]] = {}
    for record in records:
        start, end = intervals.get(record["step"], (record["start_ns"], record["end_ns"]))
        intervals[record["step"]] = (min(start, record["start_ns"]), max(end, record["end_ns"]))
    return dict(sorted(intervals.items()))


def summarise(records: Sequence[Record]) -> list[RankSummary]:
    """Add up every rank's time; idle time counts within steps only, not between them."""
    step_ns = _covered(list(step_intervals(records).values()))
    summaries = []
    for rank in sorted({record["rank"] for record in records}):
        spent: dict[Activity, int] = dict.fromkeys(("forward", "backward", "other", "wait", "transfer"), 0)
        busy: list[tuple[int, int]] = []
        sent_bytes = 0
        for record in records:
            if record["rank"] != rank:
                continue
            kind = activity(record)
            spent[kind] += record["end_ns"] - record["start_ns"]
            if kind in ("forward", "backward", "other"):
                busy.append((record["start_ns"], record["end_ns"]))
            if record["kind"] == "send":
                sent_bytes += record.get("bytes", 0)
        summaries.append(
            RankSummary(
                rank=rank,
                forward_ns=spent["forward"],
                backward_ns=spent["backward"],
                other_ns=spent["other"],
                idle_ns=step_ns - _covered(busy),
                step_ns=step_ns,
                sent_bytes=sent_bytes,
            )
        )
    return summaries


def _covered(intervals: Sequence[tuple[int, int]]) -> int:
    """Length of the union of intervals."""
    covered, reached = 0, None
    for start, end in sorted(intervals):
        start = start if reached is None else max(start, reached)
        if end > start:
            covered += end - start
            reached = end
    return covered
