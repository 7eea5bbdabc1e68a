"""Offloading the optimizer: its state is in a file or in host memory, and a step has a part of it at hand at once."""

from shardwright.optimizer.offloading.chunks import most_resident_bytes
from shardwright.optimizer.offloading.refusals import refuse_differentiable
from shardwright.optimizer.offloading.storage import StateStorage, storage_for
from shardwright.optimizer.offloading.streamed import StreamedState

__all__ = [
    "StateStorage",
    "StreamedState",
    "most_resident_bytes",
    "refuse_differentiable",
    "storage_for",
]
