"""Python objects between ranks: send, receive, broadcast, all-gather and barriers (the spec's 2.3)."""

from __future__ import annotations

from typing import Any

from shardwright.errors import ShardwrightError
from shardwright.ranks import DP_GROUP, MP_GROUP, WORLD, CommGroup, RankType, global_rank, group_ranks
from shardwright.runtime import Runtime, current_runtime
from shardwright.values import decode_from, encode

_CHANNEL = "objects"
_GATHER_CHANNEL = "allgather"


def send_on(runtime: Runtime, rank: int, channel: str, value: Any) -> None:
    """Send to a global rank on a channel of the library's own, apart from the script's objects."""
    runtime.node.send_object(rank, channel, *encode(value))


def receive_on(runtime: Runtime, rank: int, channel: str, deadline: float | None = None) -> Any:
    """Wait for what a global rank sent by :func:`send_on`; raises ``TimeoutError`` at a deadline (monotonic time)."""
    return decode_from(runtime, rank, *runtime.receive_object(rank, channel, deadline))


def send(obj: Any, dest_rank: int, rank_type: RankType) -> None:
    """Send an object to a rank, which takes it by :func:`recv_from`; does not wait for it.

    Args:
        obj: Any value of the types that cross ranks, tensors included (they arrive on the receiver's device).
        dest_rank: The receiver.
        rank_type: How ``dest_rank`` is meant.

    Raises:
        UnsupportedValueError: The object holds a value of a type that cannot cross ranks.
        PeerLostError: The receiver is gone.
    """
    send_on(current_runtime(), global_rank(dest_rank, rank_type), _CHANNEL, obj)


def recv_from(src_rank: int, rank_type: RankType) -> Any:
    """Wait for the next object that a rank sent or broadcast to this one.

    Raises:
        PeerLostError: The sender is gone.
    """
    return receive_on(current_runtime(), global_rank(src_rank, rank_type), _CHANNEL)


def broadcast(obj: Any, group: CommGroup) -> None:
    """Send an object to all others in a group, which take it by :func:`recv_from`."""
    runtime = current_runtime()
    for rank in group_ranks(group):
        if rank != runtime.rank:
            send_on(runtime, rank, _CHANNEL, obj)


def allgather(obj: Any, group: CommGroup) -> list[Any]:
    """Every rank's object, in the order of the group's ranks; called by all of them.

    Raises:
        ShardwrightError: Another rank has called it more often, since this one has left some calls out.
    """
    runtime = current_runtime()
    ranks = group_ranks(group)
    channel = f"{_GATHER_CHANNEL} {group.value}"
    # Calls are numbered: one that was interrupted leaves objects behind, which must not be taken for those of the next.
    runtime.gathers[channel] += 1
    number = runtime.gathers[channel]
    for rank in ranks:
        if rank != runtime.rank:
            send_on(runtime, rank, channel, (number, obj))
    return [obj if rank == runtime.rank else _gathered(runtime, rank, channel, number) for rank in ranks]


def _gathered(runtime: Runtime, rank: int, channel: str, number: int) -> Any:
    while True:
        theirs, obj = receive_on(runtime, rank, channel)
        if theirs == number:
            return obj
        if theirs > number:
            raise ShardwrightError(
                f"rank {rank} takes part in gather {theirs} of a group, rank {runtime.rank} in gather {number}: all "
                "of its ranks have to call the same barriers, gathers, state dicts and clips in the same order"
            )


def barrier(group: CommGroup = WORLD) -> None:
    """Wait until every rank of the group has called this."""
    allgather(None, group)


def dp_barrier() -> None:
    """Wait for the data-parallel group."""
    barrier(DP_GROUP)


def mp_barrier() -> None:
    """Wait for the model replica."""
    barrier(MP_GROUP)
