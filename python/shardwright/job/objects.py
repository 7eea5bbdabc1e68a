"""Sending Python objects between ranks: send, receive, broadcast, all-gather and barriers (spec, 2.3).

Before ``smp.init``, all functions raise :class:`ShardwrightError`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable
from typing import Any

from shardwright.errors import PeerLostError, ShardwrightError
from shardwright.job.exchange import Gathers, arrived, receive_object, send_object
from shardwright.job.ranks import DP_GROUP, MP_GROUP, WORLD, CommGroup, RankType, global_rank, group_ranks
from shardwright.job.received import decode_from
from shardwright.job.runtime import Runtime, current_runtime
from shardwright.job.waiting import GroupCall
from shardwright.values import encode

_CHANNEL = "objects"
#: What is told of a rank whose script has ended without an error.
_LEFT = "has left the job"


def send_on(runtime: Runtime, rank: int, channel: str, value: Any) -> None:
    """Send a value to a global rank on an internal channel, separate from the script's objects."""
    send_object(runtime, rank, channel, *encode(value))


def receive_on(runtime: Runtime, rank: int, channel: str, deadline: float | None = None) -> Any:
    """Receive a value sent by :func:`send_on`; raises ``TimeoutError`` after ``deadline`` (monotonic time)."""
    return decode_from(runtime, rank, *receive_object(runtime, rank, channel, deadline))


def receive_from_others(runtime: Runtime, channel: str, seconds: float) -> list[Any]:
    """Receive what every other rank has sent on a channel, by rank; raises ``TimeoutError`` after so many seconds."""
    deadline = time.monotonic() + seconds
    others = (rank for rank in range(runtime.place.launch.world_size) if rank != runtime.place.rank)
    return [receive_on(runtime, rank, channel, deadline) for rank in others]


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
    """Send an object to a rank, which receives it with :func:`recv_from` (spec, 2.3).

    Returns without waiting for the receiver.

    Args:
        obj: The object. Tensors in it arrive on the receiver's device.
        dest_rank: The receiving rank.
        rank_type: How ``dest_rank`` is interpreted.

    Raises:
        ConfigError: ``dest_rank`` does not exist, or ``rank_type`` is not a :class:`RankType`.
        UnsupportedValueError: The object contains a value of a type that cannot be sent.
        PeerLostError: The receiver is gone.
    """
    send_on(current_runtime(), global_rank(dest_rank, rank_type, "dest_rank"), _CHANNEL, obj)


def recv_from(src_rank: int, rank_type: RankType) -> Any:
    """Wait for the next object that a rank sent or broadcast to this rank, and return it (spec, 2.3).

    Args:
        src_rank: The sending rank.
        rank_type: How ``src_rank`` is interpreted.

    Raises:
        ConfigError: ``src_rank`` does not exist, or ``rank_type`` is not a :class:`RankType`.
        UnsupportedValueError: The object is of a class that is not registered on this rank.
        PeerLostError: The sender is gone.
        RemoteError: The step in which this is called has failed on another rank.
        StallError: All ranks wait for one another, or the job has made no progress for ``stall_timeout_seconds``.
    """
    return receive_on(current_runtime(), global_rank(src_rank, rank_type, "src_rank"), _CHANNEL)


def broadcast(obj: Any, group: CommGroup) -> None:
    """Send an object to all other ranks of a group, which receive it with :func:`recv_from` (spec, 2.3).

    Returns without waiting for the receivers. Errors are those of :func:`send`.
    """
    runtime = current_runtime()
    for rank in group_ranks(group):
        if rank != runtime.place.rank:
            send_on(runtime, rank, _CHANNEL, obj)


def allgather(obj: Any, group: CommGroup) -> list[Any]:
    """Gather an object from every rank of a group (spec, 2.3). All ranks of the group must call this.

    Args:
        obj: The object of this rank.
        group: The group.

    Returns:
        The objects of all ranks, in the order of their ranks.

    Raises:
        ConfigError: ``group`` is not a :class:`CommGroup`.
        UnsupportedValueError: The object contains a value of a type that cannot be sent.
        PeerLostError: A rank of the group is gone.
        RemoteError: The step in which this is called has failed on another rank.
        StallError: All ranks wait for one another, or the job has made no progress for ``stall_timeout_seconds``.
        ShardwrightError: Another rank calls a different function or has called this one more often.
    """
    return gathered("smp.allgather", obj, group)


def gathered(operation: str, obj: Any, group: CommGroup, *, to_first: bool = False) -> list[Any]:
    """Gather an object from every rank of a group, like :func:`allgather`, on behalf of ``operation``.

    Messages carry the number of the call and its operation: an interrupted call leaves objects behind that the next
    call must not receive, and another rank may have called something else. With ``to_first``, only the first rank of
    the group gets the objects; the others return an empty list without waiting.
    """
    runtime = current_runtime()
    ranks = group_ranks(group)
    channel = f"gather {group.value}"
    call = GroupCall(operation, channel, runtime[Gathers].next(channel), list(ranks))
    receivers = ranks[:1] if to_first else ranks
    try:
        for rank in receivers:
            if rank != runtime.place.rank:
                send_on(runtime, rank, _lane(channel, call.number), (call.number, operation, obj))
        if runtime.place.rank not in receivers:
            return []
        others = [rank for rank in ranks if rank != runtime.place.rank]
        found = {runtime.place.rank: obj, **_objects_of(runtime, others, call)}
        return [found[rank] for rank in ranks]
    except PeerLostError as lost:
        # A rank that was killed would have called it too; a deadlock adds it where it is proven.
        if lost.message.endswith(_LEFT):
            lost.add_note(call.advice)
        raise


def tell_gathering(operation: str, obj: Any, group: CommGroup) -> None:
    """Send an object to the other ranks of a group, which are in :func:`gathered`, without receiving theirs."""
    runtime = current_runtime()
    channel = f"gather {group.value}"
    call = runtime[Gathers].next(channel)
    for rank in group_ranks(group):
        if rank != runtime.place.rank:
            with contextlib.suppress(ShardwrightError):  # one that is gone needs no word
                send_on(runtime, rank, _lane(channel, call), (call, operation, obj))


def _lane(channel: str, number: tuple[int, int]) -> str:
    """Where messages of a gather travel: apart from those of before ranks waited in vain, which may still be read."""
    epoch, _ = number
    return f"{channel}, {epoch}"


def _objects_of(runtime: Runtime, ranks: list[int], call: GroupCall) -> dict[int, Any]:
    """Wait for what each of these ranks gives to a call, and hear of any that is gone while waiting for another."""
    lane, here = _lane(call.channel, call.number), dict[int, Any]()
    found: dict[int, Any] = {}

    def look_at_others(waiting_for: int) -> None:
        for rank in ranks:
            if rank == waiting_for or rank in found or rank in here:
                continue
            if (received := arrived(runtime, rank, lane)) is not None:
                here[rank] = received

    for rank in ranks:
        while rank not in found:
            what = f"rank {rank} to come to {call.operation}"
            received = here.pop(rank, None)
            if received is None:
                beside = functools.partial(look_at_others, rank)
                received = receive_object(runtime, rank, lane, what=what, call=call, beside=beside)
            theirs, operation, obj = decode_from(runtime, rank, *received)
            if theirs == call.number and operation == call.operation:
                found[rank] = obj
            elif theirs >= call.number:
                calls = "more calls of it" if operation == call.operation else operation
                raise ShardwrightError(
                    f"rank {runtime.place.rank} is in {call.operation} and rank {rank} in {calls}: all ranks of a "
                    "group have to call the same barriers, gathers, state dicts and clips in the same order, so "
                    f"{call.advice}"
                )
    return found


def barrier(group: CommGroup = WORLD) -> None:
    """Wait until every rank of a group, by default all ranks, has called this (spec, 2.3).

    Errors are those of :func:`allgather`.
    """
    gathered("smp.barrier", None, group)


def dp_barrier() -> None:
    """Wait until every rank of DP_GROUP has called this; see :func:`barrier` (spec, 2.3)."""
    barrier(DP_GROUP)


def mp_barrier() -> None:
    """Wait until every rank of MP_GROUP has called this; see :func:`barrier` (spec, 2.3)."""
    barrier(MP_GROUP)
