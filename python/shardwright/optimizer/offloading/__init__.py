"""Offloading the optimizer: its state is in a file, of which a step has a part in memory at once."""

from shardwright.optimizer.offloading.chunks import most_resident_bytes
from shardwright.optimizer.offloading.refusals import may_be_streamed, refuse_streaming
from shardwright.optimizer.offloading.storage import StateStorage, check_device
from shardwright.optimizer.offloading.streamed import StreamedState

__all__ = [
    "StateStorage",
    "StreamedState",
    "check_device",
    "may_be_streamed",
    "most_resident_bytes",
    "refuse_streaming",
]
