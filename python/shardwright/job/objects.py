"""Python objects between ranks: send, receive, broadcast, all-gather and barriers (the spec's 2.3)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardwright.errors import ShardwrightError
from shardwright.job.exchange import Gathers, receive_object, send_object
from shardwright.job.ranks import DP_GROUP, MP_GROUP, WORLD, CommGroup, RankType, global_rank, group_ranks
from shardwright.job.received import decode_from
from shardwright.job.runtime import Runtime, current_runtime
from shardwright.values import encode

_CHANNEL = "objects"


def send_on(runtime: Runtime, rank: int, channel: str, value: Any) -> None:
    """Send to a global rank on a channel of the library's own, apart from the script's objects."""
    send_object(runtime, rank, channel, *encode(value))


def receive_on(runtime: Runtime, rank: int, channel: str, deadline: float | None = None) -> Any:
    """Wait for what a global rank sent by :func:`send_on`; raises ``TimeoutError`` at a deadline (monotonic time)."""
    return decode_from(runtime, rank, *receive_object(runtime, rank, channel, deadline))


def send_in_step(runtime: Runtime, rank: int, channel: str, value: Any) -> None:
    """Send to a global rank what belongs to the step that runs; see :func:`receive_in_step`."""
    send_on(runtime, rank, channel, (runtime.step.number, value))


def receive_in_step(runtime: Runtime, rank: int, channel: str) -> Any:
    """Wait for what a global rank sent by :func:`send_in_step` in the same step, and not in one that failed."""
    while True:
        step, value = receive_on(runtime, rank, channel)
        if step == runtime.step.number:
            return value


def exchange_in_step(runtime: Runtime, ranks: Iterable[int], channel: str, value: Any) -> dict[int, Any]:
    """Tell other ranks something of the step that runs, and wait for what each of them tells; by rank."""
    ranks = list(ranks)
    for rank in ranks:
        send_in_step(runtime, rank, channel, value)
    return {rank: receive_in_step(runtime, rank, channel) for rank in ranks}


def send(obj: Any, dest_rank: int, rank_type: RankType) -> None:
    """Send an object to a rank, which takes it by :func:`recv_from`; does not wait for it.

    Args:
        obj: Any value of the types that cross ranks, tensors included (they arrive on the receiver's device).
        dest_rank: The receiver.
        rank_type: How ``dest_rank`` is meant.

    Raises:
        ConfigError: There is no such rank, or type of ranks.
        UnsupportedValueError: The object holds a value of a type that cannot cross ranks.
        PeerLostError: The receiver is gone.
    """
    send_on(current_runtime(), global_rank(dest_rank, rank_type, "dest_rank"), _CHANNEL, obj)


def recv_from(src_rank: int, rank_type: RankType) -> Any:
    """Wait for the next object that a rank sent or broadcast to this one.

    Raises:
        ConfigError: There is no such rank, or type of ranks.
        PeerLostError: The sender is gone.
    """
    return receive_on(current_runtime(), global_rank(src_rank, rank_type, "src_rank"), _CHANNEL)


def broadcast(obj: Any, group: CommGroup) -> None:
    """Send an object to all others in a group, which take it by :func:`recv_from`."""
    runtime = current_runtime()
    for rank in group_ranks(group):
        if rank != runtime.place.rank:
            send_on(runtime, rank, _CHANNEL, obj)


def allgather(obj: Any, group: CommGroup) -> list[Any]:
    """Every rank's object, in the order of the group's ranks; called by all of them.

    Raises:
        ShardwrightError: Another rank calls something else, or has called it more often.
    """
    return gathered("smp.allgather", obj, group)


def gathered(operation: str, obj: Any, group: CommGroup, *, to_first: bool = False) -> list[Any]:
    """Every rank's object, in the order of the group's ranks; called by all of them.

    Calls are numbered, and say what they are for: one that was interrupted leaves objects behind, which must not be
    taken for those of the next, and where one rank saves another one may have come to a barrier.

    Args:
        operation: What the ranks have to call together, for errors.
        obj: This rank's.
        group: The ranks.
        to_first: Whether only the group's first rank needs the objects; the others get an empty list and do not wait.

    Raises:
        ShardwrightError: Another rank calls something else, or has called more.
    """
    runtime = current_runtime()
    ranks = group_ranks(group)
    channel = f"gather {group.value}"
    call = runtime[Gathers].next(channel)
    receivers = ranks[:1] if to_first else ranks
    for rank in receivers:
        if rank != runtime.place.rank:
            send_on(runtime, rank, channel, (call, operation, obj))
    if runtime.place.rank not in receivers:
        return []
    return [
        obj if rank == runtime.place.rank else _object_of(runtime, rank, channel, call, operation) for rank in ranks
    ]


def _object_of(runtime: Runtime, rank: int, channel: str, call: tuple[int, int], operation: str) -> Any:
    while True:
        received = receive_object(runtime, rank, channel, what=f"rank {rank} to come to {operation}")
        theirs, what, obj = decode_from(runtime, rank, *received)
        if theirs == call and what == operation:
            return obj
        if theirs >= call:
            calls = "more calls of it" if what == operation else what
            raise ShardwrightError(
                f"rank {runtime.place.rank} is in {operation} and rank {rank} in {calls}: all ranks of a group have to "
                "call the same barriers, gathers, state dicts and clips in the same order"
            )


def barrier(group: CommGroup = WORLD) -> None:
    """Wait until every rank of the group has called this."""
    gathered("smp.barrier", None, group)


def dp_barrier() -> None:
    """Wait for the data-parallel group."""
    barrier(DP_GROUP)


def mp_barrier() -> None:
    """Wait for the model replica."""
    barrier(MP_GROUP)
