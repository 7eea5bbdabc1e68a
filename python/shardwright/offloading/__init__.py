"""Activation offloading: what checkpointed modules keep is out of memory until their backward is near."""

from shardwright.offloading.activations import OffloadedActivations, find_offload_directory
from shardwright.offloading.tensors import Kept, OffloadedTensor

__all__ = ["Kept", "OffloadedActivations", "OffloadedTensor", "find_offload_directory"]
