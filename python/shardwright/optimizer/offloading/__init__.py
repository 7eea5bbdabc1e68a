"""Offloading the optimizer: its state is in a file, of which a step has a part in memory at once."""

from shardwright.optimizer.offloading.chunks import most_resident_bytes
from shardwright.optimizer.offloading.refusals import refuse_differentiable
from shardwright.optimizer.offloading.storage import StateStorage, check_device
from shardwright.optimizer.offloading.streamed import StreamedState

__all__ = [
    "StateStorage",
    "StreamedState",
    "check_device",
    "most_resident_bytes",
    "refuse_differentiable",
]
